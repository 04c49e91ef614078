"""A connection of an HTTP server that costs little until its client has sent a whole request.

uvicorn bounds neither the number of connections nor the time in which a request has to arrive. This
adds both, and h11 bounds the head. So a client without a key holds neither memory nor descriptors.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_PIECES = 1_024  # of a chunked body: each costs as much as another request


class Limits(NamedTuple):
    """What clients may use up of a server."""

    connections: int = 4_096
    head_bytes: int = 65_536
    head_s: float = 20.0  # from a connection, or the first byte of a request, to the head's end
    body_s: float = 60.0  # from the end of the head to the end of the body
    # After an answer so long for the client to take it, or to stop sending what nothing reads.
    linger_s: float = 2.0
    answer_s: float = 60.0  # for the client to take an answer that the kernel has no room for


class ShortChunks(h11.Connection):
    """Refuses a body that comes in more pieces than any client makes of one."""

    pieces = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.pieces = 0
        elif isinstance(event, h11.Data) and event.chunk_end:
            self.pieces += 1
            if self.pieces > MAX_PIECES:
                raise h11.RemoteProtocolError(f"the body has more than {MAX_PIECES:,} chunks")
        return event


class LimitedConnection(H11Protocol):
    """A connection that is ended when its request does not arrive in time.

    `waiting` is shared by the connections of a server: those whose client has sent no whole head,
    or takes no answer, the longest waiting first. It is ended when there are too many connections,
    so that silent ones keep no client out.

    No client in use sends a request before it has the answer to the last one. One that does is
    answered once: the requests of a thousand such connections would be a queue for all others.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        waiting: dict[LimitedConnection, None],
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self.conn = ShortChunks(h11.SERVER, limits.head_bytes)
        self._limits = limits
        self._waiting = waiting
        self._timer: asyncio.TimerHandle | None = None
        self._timed: object = None  # what the timer is for
        self._untaken: asyncio.TimerHandle | None = None  # runs while an answer is not taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting[self] = None
        self._time("head", self._limits.head_s)
        if len(self.connections) > self._limits.connections:
            next(iter(self._waiting)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        self._time(None)
        self._stop_untaken()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        is_read = self.conn.their_state is not h11.SEND_BODY
        if is_read and self.conn.trailing_data[0]:
            self.transport.close()
            self._time("linger", self._limits.linger_s)
        super().on_response_complete()
        if not is_read:
            self._time("linger", self._limits.linger_s)
        elif self.conn.their_state is h11.IDLE:
            self._waiting[self] = None
            self._time(None)  # uvicorn limits how long a connection is kept for the next request

    def pause_writing(self) -> None:
        super().pause_writing()
        self._waiting[self] = None
        self._stop_untaken()
        self._untaken = self.loop.call_later(self._limits.answer_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_untaken()
        if self.conn.their_state is not h11.IDLE:
            self._waiting.pop(self, None)

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # The client may not have taken the answer; closing would wait.

    def _stop_untaken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _watch_request(self) -> None:
        """Time what the client has to send next."""
        match self.conn.their_state:
            case h11.IDLE:
                self._time("head", self._limits.head_s)
            case h11.SEND_BODY:
                self._waiting.pop(self, None)
                if self._timed != "linger":
                    self._time("body", self._limits.body_s)
            case _:
                self._waiting.pop(self, None)
                self._time(None)

    def _time(self, what: object, limit_s: float = 0.0) -> None:
        """Give the client so long for something. It has that already where this is the same."""
        if what == self._timed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timed = what
        self._timer = None
        if what is not None:
            self._timer = self.loop.call_later(limit_s, self.transport.abort)
