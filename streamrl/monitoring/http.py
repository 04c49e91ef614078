"""What a part says of itself over HTTP: `/livez`, `/readyz`, `/metrics`. One server for all parts,
in a thread beside them; it only reads.

What there is to say comes from the part's log (`log/instrumented.py`). The metrics are those of the
topic `metrics`, by the names of `metric_names.py`, each with its run and its part as labels. Where
a part listens is noted beside the runs, for Prometheus.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6, gethostname
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from streamrl.config import topology
from streamrl.config.checks import is_loopback
from streamrl.config.run_file import RunFile
from streamrl.errors import InferenceError, PortTaken
from streamrl.log.instrumented import InstrumentedLog
from streamrl.log.protocol import Log
from streamrl.monitoring.metric_names import MetricSpec, find_metric, prometheus_name

logger = logging.getLogger(__name__)

LOOK_S = 5.0  # between two questions to the broker
REQUEST_S = 10.0  # for a client to say what it wants
# for the thread that asks the broker, when the part ends: it may be the broker that is gone, and
# then a part leaves at once
LEAVE_S = 0.5
# beside the runs: a file a part, where `file_sd_configs` finds them (it takes one * in a path, at
# its end)
TARGETS = ".targets"
SLOW = tuple(role.name for role in topology.ROLES if role.is_slow)
TEXT = "text/plain; charset=utf-8"


class Address(NamedTuple):
    """Where a part listens; 0: any free port."""

    host: str
    port: int


class ListenOverride(NamedTuple):
    """What the command line of one part says instead of the run file; None: nothing."""

    host: str | None = None
    port: int | None = None


NO_OVERRIDE = ListenOverride()


class Page(NamedTuple):
    status: int
    body: bytes
    content_type: str = TEXT


@contextlib.contextmanager
def serving(run: RunFile, log: Log, part: str, at: ListenOverride = NO_OVERRIDE) -> Generator[Log]:
    """The log that `part` is to use, and the server for as long as the block lasts. Raises
    PortTaken.
    """
    if not run.metrics.serve:
        yield log
        return
    instrumented = InstrumentedLog(log, part)
    pages = Pages(run.run, instrumented, limit_s(run, part))
    server = listen(resolve_address(run, at), pages)
    over = threading.Event()
    file = note_of(run, part)
    threads = [
        threading.Thread(target=server.serve_forever, args=(0.2,), name="health", daemon=True),
        threading.Thread(
            target=_poll_broker,
            args=(instrumented, over, file, run.run, server.address),
            name="lag",
            daemon=True,
        ),
    ]
    for thread in threads:
        thread.start()
    try:
        yield instrumented
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        threads[1].join(LEAVE_S)
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def resolve_address(run: RunFile, at: ListenOverride) -> Address:
    return Address(
        run.metrics.host if at.host is None else at.host,
        run.metrics.port if at.port is None else at.port,
    )


def note_of(run: RunFile, part: str) -> Path:
    """The file that says where the part listens."""
    return run.directory.parent / TARGETS / f"{run.run}.{part}.json"


def limit_s(run: RunFile, part: str) -> float:
    """A part whose loop has not turned for so long is not alive."""
    return run.metrics.step_within_s if part.startswith(SLOW) else run.metrics.live_within_s


def remove_targets(run: RunFile) -> None:
    """Take away what parts of the run have noted: those that were killed could not. One that lives
    notes it again.
    """
    for file in (run.directory.parent / TARGETS).glob(f"{run.run}.*.json"):
        file.unlink(missing_ok=True)


def _poll_broker(
    log: InstrumentedLog, over: threading.Event, file: Path, run: str, address: Address
) -> None:
    """Ask the broker for the ends of the inputs, now and then; soon again while that is what
    readiness waits for. And keep the note.
    """
    pages = -1
    said = False
    while not over.is_set():
        if pages != len(log.pages) or not file.exists():
            first = pages < 0
            pages = len(log.pages)
            _write_targets(file, run, address, log, logging.INFO if first else logging.DEBUG)
        if log.is_ready and not said:  # before that, what a part says is why it cannot begin
            said = True
            logger.info("%s: http://%s:%d/metrics, /livez, /readyz", log.part, *address)
        log.refresh_end_offsets()
        over.wait(LOOK_S if not log.readiness_problems() else LOOK_S / 10)


def _write_targets(
    file: Path, run: str, address: Address, log: InstrumentedLog, level: int
) -> None:
    """Tell Prometheus where this part is. A directory that cannot be written is no reason not to
    work: then somebody has chosen the port.
    """
    host = gethostname() if address.host in ("0.0.0.0", "::") else address.host
    target = f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}"
    labels = {"run": run, "part": log.part}
    entries: list[dict[str, object]] = [{"targets": [target], "labels": labels}]
    for path in log.pages:
        entries.append(
            {
                "targets": [target],
                "labels": {**labels, "page": path.rpartition("/")[2], "__metrics_path__": path},
            }
        )
    part = file.with_suffix(".part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(entries, indent=1))
        part.replace(file)
    except OSError as error:
        logger.log(
            level,
            "%s cannot be written (%s): Prometheus has to be told of %s",
            file,
            error.strerror,
            target,
        )


# ---- the pages -----------------------------------------------------------------------------------


class Pages:
    """What is shown at each path."""

    def __init__(self, run: str, log: InstrumentedLog, within_s: float) -> None:
        self._log = log
        self._within_s = within_s
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(MetricsCollector(run, log))
        ProcessCollector(registry=self._registry)

    def at(self, path: str) -> Page:
        match path:
            case "/livez":
                return self.live()
            case "/readyz":
                lacks = self._log.readiness_problems()
                return (
                    Page(503, "".join(f"{self._log.part}: {lack}\n" for lack in lacks).encode())
                    if lacks
                    else Page(200, b"ready\n")
                )
            case "/metrics":
                return Page(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)
            case _ if path in self._log.pages:
                try:
                    return Page(200, self._log.pages[path](), CONTENT_TYPE_LATEST)
                except InferenceError as error:
                    return Page(503, f"{error}\n".encode())
            case _:
                there = ", ".join(("/livez", "/readyz", "/metrics", *self._log.pages))
                return Page(404, f"nothing at {path}; there are {there}\n".encode())

    def live(self) -> Page:
        """Does its loop turn?"""
        if (since_s := self._log.since_activity_s) <= self._within_s:
            return Page(200, b"alive\n")
        return Page(
            503,
            f"{self._log.part}: its loop last turned {since_s:.0f} s ago, the limit is"
            f" {self._within_s:.0f} s\n".encode(),
        )


class MetricsCollector:
    """The newest value of every metric, as prometheus_client collects them."""

    def __init__(self, run: str, log: InstrumentedLog) -> None:
        self._run = run
        self._log = log

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for (source, name), value in self._values().items():
            known = find_metric(name)
            labels, of = (known[0].labels, known[1]) if known else ((), ())
            family = known[0].prometheus if known else prometheus_name(name)
            if family not in families:
                kind = (
                    CounterMetricFamily
                    if known and known[0].kind == "counter"
                    else GaugeMetricFamily
                )
                families[family] = kind(
                    family, _help(known[0]) if known else name, labels=("run", "part", *labels)
                )
            families[family].add_metric([self._run, source, *of], value)
        return iter(families.values())

    def _values(self) -> dict[tuple[str, str], float]:
        """(source, name) -> value: of steps, of reports, of the log."""
        log = self._log
        values = dict(self._log.steps)
        for source, report in (*log.reports.items(), (log.part, log.metrics())):
            values |= {(source, name): value for name, value in report.items()}
        return values


def _help(known: MetricSpec) -> str:
    return f"{known.name} ({known.unit}): {known.meaning}"


# ---- the server ----------------------------------------------------------------------------------


class MetricsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: Address, pages: Pages) -> None:
        self.pages = pages
        if ":" in address.host:
            self.address_family = AF_INET6
        super().__init__((address.host, address.port), Handler)

    @property
    def address(self) -> Address:
        return Address(str(self.server_address[0]), int(self.server_address[1]))


class Handler(BaseHTTPRequestHandler):
    """GET, and nothing that changes anything."""

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
        """On loopback only by a name of loopback: a web page elsewhere may have its own name point
        here (DNS rebinding).
        """
        asked = self.headers.get("Host")
        if asked is None or not is_loopback(bound):
            return True
        return is_loopback((urlsplit(f"//{asked}").hostname or "") if asked.isprintable() else "")

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def listen(address: Address, pages: Pages) -> MetricsServer:
    """Raises PortTaken."""
    try:
        return MetricsServer(address, pages)
    except OSError as error:
        where = (
            f"metrics cannot be shown at {address.host}:{address.port} ({error.strerror or error})"
        )
        raise PortTaken(
            f"{where}; choose another --metrics-port (0: any free one) or --metrics-host"
        ) from None
