"""An HTTP server in a separate thread, and the socket that it listens on."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from streamrl.system.errors import ConfigError, PortTaken
from streamrl.system.http_connection import LimitedConnection, Limits

LIMITS = Limits()


def open_listener(host: str, port: int, who: str, setting: str, hint: str) -> socket.socket:
    """A socket that listens at this address.

    Raises ConfigError, which names `setting`, if there is no such address, and PortTaken, which
    states that `who` cannot listen and gives the `hint`.
    """
    try:
        socket.getaddrinfo(host or None, port)
    except socket.gaierror:
        raise ConfigError(f"{setting} {host}: there is no such address") from None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1_024)
    except OSError as error:
        cause = os.strerror(error.errno or 0)
        raise PortTaken(f"{who} cannot listen on {host}:{port} ({cause}); {hint}") from None


def url_of(listener: socket.socket) -> str:
    """The URL at which clients reach the listener."""
    address = listener.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"


class HttpServerThread:
    """Serves an ASGI application from a thread for as long as the `with` block lasts.

    In the main thread uvicorn would install its own signal handlers. Requests in flight have
    `stop_timeout_s` to end, and idle connections are kept for `keep_alive_s`. `limits` bounds what
    clients use up before they have sent a request.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        listener: socket.socket,
        stop_timeout_s: int,
        keep_alive_s: int = 5,
        limits: Limits = LIMITS,
    ) -> None:
        connection: Any = partial(LimitedConnection, limits=limits, waiting={})
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            log_level="error",  # A client could have a warning logged for each of its bytes.
            access_log=False,
            timeout_graceful_shutdown=stop_timeout_s,
            timeout_keep_alive=keep_alive_s,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="http"
        )

    def __enter__(self) -> HttpServerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Take no more requests, and end once those in flight have ended."""
        self._server.should_exit = True

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()
