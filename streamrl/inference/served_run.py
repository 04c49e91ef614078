"""A run whose newest version a server has: the run that the server belongs to, or a guest, which is
another run on the same base (inference.also_serves).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.errors import WeightError
from streamrl.inference.load_schedule import LoadSchedule
from streamrl.inference.probe import ProbeTolerance
from streamrl.inference.registration import Registration
from streamrl.inference.version_follower import VersionFollower
from streamrl.inference.vllm_host import LoadResult, VllmHost
from streamrl.log.meter import Meter
from streamrl.records import PolicyVersion

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class ServedRun:
    """A run that a server serves: the versions that it reads there, and its own record there."""

    guest: str = ""  # name of the run; empty: the server's own
    announced: VersionFollower
    registration: Registration
    meter: Meter
    tolerance: ProbeTolerance
    schedule: LoadSchedule = field(default_factory=LoadSchedule)
    newest: PolicyVersion | None = None  # the last that was read
    attempted_s: float = -math.inf  # when a version was last loaded, monotonic

    def follow(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for an announcement."""
        self.newest = self.announced.newest(timeout_s)

    def is_due(self, time_s: float) -> bool:
        return self.newest is not None and self.schedule.is_due(self.newest, time_s)

    def finish_load(self, job: Future[LoadResult], host: VllmHost) -> None:
        """Publish the outcome of loading a version. It is loaded again later if the copy was bad,
        so that the server stays on its version, or if the probe failed. Raises any other
        StreamrlError of the load.
        """
        if self._publish_outcome(job, host):
            self.schedule.on_success()
        else:
            self.schedule.on_failure(time.monotonic())

    def _publish_outcome(self, job: Future[LoadResult], host: VllmHost) -> bool:
        registration = self.registration
        prefix = registration.prefix
        try:
            served = job.result()
        except WeightError as error:
            logger.error("%sstaying on version %d: %s", prefix, registration.server.version, error)
            registration.update(error=str(error))
            return False
        failure = served.probe_failure(self.tolerance)
        registration.update(
            url=host.url,
            model=served.model,
            version=served.version,
            state="error" if failure else "ready",
            error=failure,
            doubted=bool(failure),
            mismatch_max_abs=served.mismatch.max_abs,
            mismatch_tokens=served.mismatch.tokens,
        )
        self.meter.publish(served.metrics(), step=served.version)
        if failure:
            logger.error(
                "%s%s; it is loaded and probed again, and asked meanwhile only if no other server"
                " is ready",
                prefix,
                failure,
            )
            return False
        logger.info(
            "%sversion %d is served; off by %.2g over %d tokens",
            prefix,
            served.version,
            served.mismatch.max_abs,
            served.mismatch.tokens,
        )
        return True


class Loading(NamedTuple):
    """A version that is being loaded in the background."""

    run: ServedRun
    job: Future[LoadResult]


def load_next(
    runs: Iterable[ServedRun], host: VllmHost, worker: ThreadPoolExecutor, time_s: float
) -> Loading | None:
    """Begin to load a version. Of the runs that have one to be loaded, the one that has waited
    longest since its last is served. None if there is none.
    """
    due = [run for run in runs if run.is_due(time_s)]
    if not due:
        return None
    run = min(due, key=lambda run: run.attempted_s)
    assert run.newest is not None
    run.attempted_s = time_s
    run.schedule.on_attempt(run.newest)
    return Loading(run, worker.submit(host.load_version, run.newest, run.guest))
