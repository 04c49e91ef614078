"""Posts JSON to one server of the run, over connections that stay open between two requests.

This is HTTP/1.1 by h11 on asyncio's streams. A library that does more costs a process that samples
more: httpx five times as much for each request (measured).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import h11
import msgspec

from streamrl.errors import describe_error, one_line

T = TypeVar("T")

MAX_CONNECTIONS = 1_000  # to a server; a request beyond these waits until one is free
KEEP_ALIVE_S = 4.0  # vLLM closes a connection that has been idle for 5 s
READ_BYTES = 1 << 16
MAX_REASON = 400  # characters of what a server says
REJECTED = (400, 422)


class RequestFailed(Exception):
    """The server did not answer, or answered with an error; the message says which."""


class RequestRejected(RequestFailed):
    """The server does not take the request as it is; the message is its reason."""


class Answer(NamedTuple):
    """What a server has answered."""

    status: int
    body: bytes


class ServerConnection:
    """The connections to one server. How long a request may take is up to the caller.

    `api_key`: is sent to the server; empty: none is.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = urlsplit(url)
        self._base = self._url.path.rstrip("/")
        self._ssl = ssl.create_default_context() if self._url.scheme == "https" else None
        self._headers = [
            ("host", self._url.netloc),
            ("content-type", "application/json"),
            ("accept", "application/json"),
        ]
        if api_key:
            self._headers.append(("authorization", f"Bearer {api_key}"))
        self._idle: deque[OpenConnection] = deque()  # the one that was used last is the last
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._is_closed = False

    async def post(self, path: str, body: Any, answer_type: type[T]) -> T:
        """The server's answer.

        Raises RequestFailed, ValueError for an answer that is not of the type, and TimeoutError
        where the operating system gives the server up.
        """
        content = msgspec.json.encode(body)
        headers = [*self._headers, ("content-length", str(len(content)))]
        try:
            request = h11.Request(method="POST", target=self._base + path, headers=headers)
        except h11.LocalProtocolError:  # its message would have the key
            raise RequestFailed("inference.api_key cannot be sent; it has one line") from None
        try:
            answer = await self._exchange(request, content)
        except TimeoutError:
            raise
        except (OSError, h11.ProtocolError) as error:
            raise RequestFailed(f"connection error ({describe_error(error)})") from None
        if answer.status >= 300:
            kind = RequestRejected if answer.status in REJECTED else RequestFailed
            raise kind(reason_of(answer))
        try:
            return msgspec.json.decode(answer.body, type=answer_type)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None

    async def close(self) -> None:
        """Close what is idle now, and what is in use as soon as it is idle."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: h11.Request, content: bytes) -> Answer:
        async with self._free:
            connection = self._take_idle() or await self._open()
            try:
                answer = await connection.exchange(request, content)
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
            return answer

    async def _open(self) -> OpenConnection:
        port = self._url.port or (443 if self._ssl else 80)
        reader, writer = await asyncio.open_connection(self._url.hostname, port, ssl=self._ssl)
        return OpenConnection(reader, writer)

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


class OpenConnection:
    """One connection, with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.used_s = 0.0  # when its last request ended
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    async def exchange(self, request: h11.Request, content: bytes) -> Answer:
        """Send a request and read what the server answers. Raises OSError, h11.ProtocolError."""
        for event in (request, h11.Data(content), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()
        status = 0
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return Answer(status, bytes(body))
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionError("the server has closed the connection")

    def may_go_on(self) -> bool:
        """Make the connection ready for the next request, if the server allows one."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def has_ended(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()


def reason_of(answer: Answer) -> str:
    """The message of an answer that is an error, or all of an answer that has none."""
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = answer.body.decode("utf-8", "replace")
    match body:
        case {"error": {"message": str(message)}} | {"message": str(message)} if message:
            return one_line(message, MAX_REASON)
        case _:
            return one_line(f"status {answer.status}: {body}", MAX_REASON)
