"""What a part answers at `/livez`, `/readyz`, `/progressz` and `/metrics`, and at its further
pages.
"""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)

from streamrl.config import topology
from streamrl.run.monitoring.collector import MetricsCollector
from streamrl.stream.log.instrumented import InstrumentedLog
from streamrl.system.errors import InferenceError

SLOW = tuple(role.name for role in topology.roles() if role.is_slow)
LIVE_WITHIN_S = 60.0  # a part whose loop has not used its log for longer is restarted
# The same limit for learner and scorers, whose loop runs once a batch and compiles.
STEP_WITHIN_S = 3_600.0
TEXT = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes
    content_type: str = TEXT


def liveness_limit_s(part: str) -> float:
    """Seconds after which a part that has not used its log is not alive."""
    return STEP_WITHIN_S if part.startswith(SLOW) else LIVE_WITHIN_S


class Pages:
    """The page at each path. A part is alive if it has used its log within `within_s`."""

    def __init__(self, run: str, log: InstrumentedLog, within_s: float) -> None:
        self._log = log
        self._within_s = within_s
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(MetricsCollector(run, log))
        ProcessCollector(registry=self._registry)

    def at(self, path: str) -> Page:
        """The page at `path`. It has status 404 if there is none."""
        match path:
            case "/livez":
                return self.live()
            case "/readyz":
                return self.ready()
            case "/progressz":
                return self.progress()
            case "/metrics":
                return Page(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)
            case _ if path in self._log.pages:
                try:
                    return Page(200, self._log.pages[path](), CONTENT_TYPE_LATEST)
                except InferenceError as error:
                    return Page(503, f"{error}\n".encode())
            case _:
                own = ("/livez", "/readyz", "/progressz", "/metrics")
                paths = ", ".join((*own, *self._log.pages))
                return Page(404, f"nothing at {path}; there are {paths}\n".encode())

    def live(self) -> Page:
        """Status 200 if the part has used its log recently, else 503."""
        since_s = self._log.since_activity_s
        if since_s <= self._within_s:
            return Page(200, b"alive\n")
        return Page(
            503,
            f"{self._log.part}: its loop last ran {since_s:.0f} s ago, the limit is"
            f" {self._within_s:.0f} s\n".encode(),
        )

    def ready(self) -> Page:
        """Status 200 if the part can work, else 503 with a line for each reason why not."""
        problems = self._log.readiness_problems()
        if not problems:
            return Page(200, b"ready\n")
        return Page(503, "".join(f"{self._log.part}: {each}\n" for each in problems).encode())

    def progress(self) -> Page:
        """Status 200 if the part has done work since it was ready, else 503."""
        if self._log.has_progressed:
            return Page(200, b"it has done work\n")
        return Page(503, f"{self._log.part}: no work since it was ready\n".encode())
