"""Serves the health and the metrics of a part over HTTP: `/livez`, `/readyz`, `/progressz` and
`/metrics`. The server runs in a thread next to the part and only reads.

`pages.py` has the answers, which come from the part's log (`stream/log/instrumented.py`), and
`targets.py` the file with the address, where Prometheus finds it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6, SHUT_RDWR, socket
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from streamrl.config.addresses import is_loopback
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.pages import Page, Pages, liveness_limit_s
from streamrl.run.monitoring.targets import Address, targets_file, write_targets
from streamrl.stream.log.instrumented import InstrumentedLog
from streamrl.stream.log.protocol import Log
from streamrl.system.errors import PortTaken

logger = logging.getLogger(__name__)

LOOK_S = 5.0  # between two questions to the broker
REQUEST_S = 10.0  # the time that a client has for its requests, from the connection on
MAX_CLIENTS = 64  # at a time; a further one takes the place of the one that came first
# When the part ends, the thread that asks the broker may wait for a broker that is gone. The part
# does not wait for it any longer than this.
LEAVE_S = 0.5


class ListenOverride(NamedTuple):
    """The address from a part's command line. None leaves what the run file has."""

    host: str | None = None
    port: int | None = None


NO_OVERRIDE = ListenOverride()


@contextlib.contextmanager
def serving(run: RunFile, log: Log, part: str, at: ListenOverride = NO_OVERRIDE) -> Generator[Log]:
    """Serve the health and the metrics of `part` for as long as the block lasts.

    Yields the log that the part must use, because the answers come from it. Raises PortTaken.
    """
    if not run.metrics.serve:
        yield log
        return
    instrumented = InstrumentedLog(log, part)
    pages = Pages(run.run, instrumented, liveness_limit_s(part))
    server = listen(resolve_address(at), pages)
    over = threading.Event()
    file = targets_file(run, part)
    server_thread = threading.Thread(
        target=server.serve_forever, args=(0.2,), name="health", daemon=True
    )
    lag_thread = threading.Thread(
        target=_poll_broker,
        args=(instrumented, over, file, run.run, server.address),
        name="lag",
        daemon=True,
    )
    server_thread.start()
    lag_thread.start()
    try:
        yield instrumented
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        lag_thread.join(LEAVE_S)
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def resolve_address(at: ListenOverride) -> Address:
    """The address to listen at: any free port on loopback, unless `at` has another."""
    return Address(at.host or "127.0.0.1", at.port or 0)


def _poll_broker(
    log: InstrumentedLog, over: threading.Event, file: Path, run: str, address: Address
) -> None:
    """Ask the broker for the end offsets of the inputs every LOOK_S, and keep the address file.

    The broker is asked more often until the part is ready, as readiness depends on the ends.
    """
    pages = -1
    is_address_logged = False
    while not over.is_set():
        if pages != len(log.pages) or not file.exists():
            first = pages < 0
            pages = len(log.pages)
            write_targets(file, run, address, log, logging.INFO if first else logging.DEBUG)
        # A part that is not ready must not log the address: its last line is shown as the reason
        # for which it is waiting.
        if log.is_ready and not is_address_logged:
            is_address_logged = True
            logger.info("%s: http://%s:%d/metrics, /livez, /readyz, /progressz", log.part, *address)
        log.refresh_end_offsets()
        over.wait(LOOK_S if not log.readiness_problems() else LOOK_S / 10)


class MetricsServer(ThreadingHTTPServer):
    """The HTTP server of a part, with a thread for each request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: Address, pages: Pages) -> None:
        self.pages = pages
        # When each connection began, the oldest first. One thread adds, others remove.
        self._began_s: dict[socket, float] = {}
        if ":" in address.host:
            self.address_family = AF_INET6
        super().__init__((address.host, address.port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. A client that has come first may be gone, or keep others out."""
        while len(self._began_s) >= MAX_CLIENTS:
            self._end(next(iter(self._began_s)))
        self._began_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._began_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are too old, whatever their clients still send."""
        oldest_s = time.monotonic() - REQUEST_S
        for connection, began_s in list(self._began_s.items()):
            if began_s < oldest_s:
                self._end(connection)

    def _end(self, connection: socket) -> None:
        """End a connection, so that the thread that reads from it ends."""
        self._began_s.pop(connection, None)
        with contextlib.suppress(OSError):
            connection.shutdown(SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what ended a request. A client that has gone is no error of this part."""
        is_client_gone = isinstance(sys.exception(), ConnectionError)
        level = logging.DEBUG if is_client_gone else logging.ERROR
        logger.log(level, "a request of %s ended", client_address, exc_info=True)

    @property
    def address(self) -> Address:
        return Address(str(self.server_address[0]), int(self.server_address[1]))


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, and nothing else."""

    protocol_version = "HTTP/1.1"
    server_version = "streamrl"
    sys_version = ""
    timeout = REQUEST_S

    def do_GET(self) -> None:
        server = cast(MetricsServer, self.server)
        if self._may_ask(server.address.host):
            page = server.pages.at(urlsplit(self.path).path)
        else:
            page = Page(400, b"it is by another name that this address is asked\n")
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    do_HEAD = do_GET

    def _may_ask(self, bound: str) -> bool:
        """Whether the request's Host may name a server that is bound to the host `bound`.

        A server on loopback must be asked by a name of loopback. Otherwise a web page could have
        its own name resolve to this machine and read the answers (DNS rebinding).
        """
        asked = self.headers.get("Host")
        if asked is None or not is_loopback(bound):
            return True
        return asked.isprintable() and is_loopback(urlsplit(f"//{asked}").hostname or "")

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def listen(address: Address, pages: Pages) -> MetricsServer:
    """Listen at `address`. Raises PortTaken if that is not possible."""
    try:
        return MetricsServer(address, pages)
    except OSError as error:
        where = (
            f"metrics cannot be shown at {address.host}:{address.port} ({error.strerror or error})"
        )
        raise PortTaken(
            f"{where}; choose another --metrics-port (0: any free one) or --metrics-host"
        ) from None
