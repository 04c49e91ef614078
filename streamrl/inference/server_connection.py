"""Posts JSON to one server of the run, over connections that stay open between two requests."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import msgspec

from streamrl.errors import describe_error, one_line

T = TypeVar("T")

LIMITS = httpx.Limits(
    max_connections=1_000,  # a request beyond these waits until one is free
    max_keepalive_connections=1_000,
    keepalive_expiry=4.0,  # vLLM closes a connection that has been idle for 5 s
)
MAX_REASON = 400  # characters of what a server says
REFUSED = (400, 422)


class RequestFailed(Exception):
    """The server did not answer, or answered with an error; the message says which."""


class RequestRejected(RequestFailed):
    """The server does not take the request as it is; the message is its reason."""


class ServerConnection:
    """The connections to one server. How long a request may take is up to the caller.

    `api_key`: is sent to the server; empty: none is.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._url = url
        self._urls: dict[str, httpx.URL] = {}  # by path, because httpx takes long to parse one
        self._http = httpx.AsyncClient(
            headers=headers, timeout=None, limits=LIMITS, follow_redirects=True
        )

    async def post(self, path: str, body: Any, answer_type: type[T]) -> T:
        """The server's answer.

        Raises RequestFailed, ValueError for an answer that is not of the type, and TimeoutError
        where the operating system gives the server up.
        """
        if path not in self._urls:
            self._urls[path] = httpx.URL(self._url + path)
        try:
            response = await self._http.post(self._urls[path], content=msgspec.json.encode(body))
        except httpx.TimeoutException as error:
            raise TimeoutError from error
        except httpx.HTTPError as error:
            raise RequestFailed(f"connection error ({describe_error(error)})") from None
        if not response.is_success:
            kind = RequestRejected if response.status_code in REFUSED else RequestFailed
            raise kind(reason_of(response))
        try:
            return msgspec.json.decode(response.content, type=answer_type)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None

    async def close(self) -> None:
        await self._http.aclose()


def reason_of(response: httpx.Response) -> str:
    """The message of an answer that is an error, or all of an answer that has none."""
    try:
        body = msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = response.text
    match body:
        case {"error": {"message": str(message)}} | {"message": str(message)} if message:
            return one_line(message, MAX_REASON)
        case _:
            return one_line(f"status {response.status_code}: {body}", MAX_REASON)
