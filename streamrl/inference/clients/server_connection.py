"""Posts JSON to one server of the run, over connections that stay open between two requests.

This is HTTP/1.1 on asyncio, with answers parsed by httptools. What does more costs a process that
samples more: h11 four times as much for each request, httpx twenty times (measured).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from streamrl.system.errors import describe_error
from streamrl.system.offloading import Offloader
from streamrl.system.text import one_line

T = TypeVar("T")

MAX_CONNECTIONS = 1_000  # to a server; a request beyond these waits until one is free
KEEP_ALIVE_S = 4.0  # vLLM closes a connection that has been idle for 5 s
MAX_REASON = 400  # characters of a server's answer
REJECTED = (400, 422)
# Of an answer: for each byte of the request, for each token that is to be sampled (its logprob, its
# experts), and in any case.
BYTES_PER_BYTE = 64
BYTES_PER_TOKEN = 4_096
MIN_ANSWER_BYTES = 16 << 20
MAX_ANSWER_BYTES = 1 << 30

# What msgspec raises for an answer that is no JSON, not of a type, or nested without end.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class RequestFailed(Exception):
    """The server did not answer, or answered with an error; the message has the cause."""


class ServerRejected(RequestFailed):
    """The server does not take the request as it is; the message is its reason."""


class Response(NamedTuple):
    """What a server has answered."""

    status: int
    body: bytes


class ServerConnection:
    """The connections to one server. How long a request may take is up to the caller.

    `api_key`: is sent to the server; empty: none is. `offloader`: decodes long answers.
    """

    def __init__(self, url: str, api_key: str = "", offloader: Offloader | None = None) -> None:
        self._url = urlsplit(url)
        self._base = self._url.path.rstrip("/")
        self._ssl = ssl.create_default_context() if self._url.scheme == "https" else None
        self._api_key = api_key
        self._offloader = offloader or Offloader()
        self._idle: deque[OpenConnection] = deque()  # the one that was used last is the last
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._is_closed = False

    async def post(self, path: str, body: Any, answer_type: type[T], tokens: int = 0) -> T:
        """The server's answer. It is bounded by the length of the request and the number of
        `tokens` that are to be sampled.

        Raises RequestFailed, ValueError for an answer that is not of the type, and TimeoutError
        where the operating system gives the server up.
        """
        request = self._request(path, msgspec.json.encode(body))
        limit = MIN_ANSWER_BYTES + BYTES_PER_BYTE * len(request) + BYTES_PER_TOKEN * tokens
        try:
            answer = await self._exchange(request, min(limit, MAX_ANSWER_BYTES))
        except TimeoutError:
            raise
        except OSError as error:
            raise RequestFailed(f"connection error ({describe_error(error)})") from None
        if answer.status >= 300:
            kind = ServerRejected if answer.status in REJECTED else RequestFailed
            raise kind(reason_of(answer))
        try:
            return await self._offloader.run(
                self._url.netloc,
                len(answer.body),
                lambda: msgspec.json.decode(answer.body, type=answer_type),
            )
        except UNREADABLE as error:
            raise ValueError(describe_error(error)) from None

    async def close(self) -> None:
        """Close what is idle now, and what is in use as soon as it is idle."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _request(self, path: str, content: bytes) -> bytes:
        """A request as it is sent. Raises RequestFailed for a key that would end its line."""
        headers = [
            f"POST {self._base}{path} HTTP/1.1",
            f"host: {self._url.netloc}",
            "content-type: application/json",
            "accept: application/json",
            f"content-length: {len(content)}",
        ]
        if self._api_key:
            if not (self._api_key.isascii() and self._api_key.isprintable()):
                raise RequestFailed("inference.api_key cannot be sent; it is one line of ASCII")
            headers.append(f"authorization: Bearer {self._api_key}")
        return "\r\n".join([*headers, "\r\n"]).encode() + content

    async def _exchange(self, request: bytes, max_bytes: int) -> Response:
        async with self._free:
            connection = self._take_idle() or await self._open()
            try:
                answer = await connection.exchange(request, max_bytes)
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
            return answer

    async def _open(self) -> OpenConnection:
        port = self._url.port or (443 if self._ssl else 80)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            OpenConnection, self._url.hostname or "", port, ssl=self._ssl
        )
        return connection

    def _take_idle(self) -> OpenConnection | None:
        """The connection that was used last, unless the server may be about to close it."""
        oldest_s = time.monotonic() - KEEP_ALIVE_S
        while self._idle and (self._idle[0].used_s < oldest_s or self._idle[0].has_ended()):
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_ended():
                return connection
            connection.close()
        return None

    def _keep(self, connection: OpenConnection) -> None:
        if self._is_closed or not connection.may_go_on():
            connection.close()
        else:
            connection.used_s = time.monotonic()
            self._idle.append(connection)


class OpenConnection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self.used_s = 0.0  # when its last request ended
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[Response] | None = None
        self._body = bytearray()
        self._has_length = False
        self._ends_with_connection = False  # the answer, because its length is not given
        self._is_reusable = True
        self._bytes_left = 0  # of the answer, its head included

    async def exchange(self, request: bytes, max_bytes: int) -> Response:
        """Send a request and read what the server answers. Raises OSError, also for an answer of
        more than `max_bytes`.
        """
        assert self._transport is not None
        self._bytes_left = max_bytes
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def may_go_on(self) -> bool:
        """Whether the server takes another request on this connection."""
        return self._is_reusable and not self.has_ended()

    def has_ended(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        self._body.clear()
        if self._transport is not None:
            self._transport.close()

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._fail(ConnectionError("the answer is longer than any to this request"))
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"no answer in HTTP/1.1: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ends_with_connection and exc is None:
            self._finish()
        lost = exc if isinstance(exc, OSError) else None
        self._fail(lost or ConnectionError("the server has closed the connection"))

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        if self._answered is None or self._answered.done():
            self._is_reusable = False  # nothing was asked
        self._body.clear()
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._has_length

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._ends_with_connection = False
        if self._parser.get_status_code() >= 200:  # or else the answer is still to come
            self._is_reusable = self._is_reusable and self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        if self._answered is not None and not self._answered.done():
            answer = Response(self._parser.get_status_code(), bytes(self._body))
            self._answered.set_result(answer)

    def _fail(self, error: OSError) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)


def reason_of(answer: Response) -> str:
    """The message of an answer that is an error, or all of an answer that has none."""
    try:
        body = msgspec.json.decode(answer.body)
    except UNREADABLE:
        body = answer.body.decode("utf-8", "replace")
    match body:
        case {"error": {"message": str(message)}} | {"message": str(message)} if message:
            return one_line(message, MAX_REASON)
        case _:
            return one_line(f"status {answer.status}: {body}", MAX_REASON)
