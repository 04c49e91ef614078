"""A run whose newest version a server has: the run that the server belongs to, or a guest, which is
another run on the same base (inference.also_serves).
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from streamrl.inference.servers.load_schedule import LoadSchedule
from streamrl.inference.servers.probe import ProbeTolerance
from streamrl.inference.servers.registration import Registration
from streamrl.inference.servers.version_follower import VersionFollower
from streamrl.inference.servers.vllm_host import LoadResult, VllmHost
from streamrl.stream.log.meter import Meter
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import WeightError

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
    _loading: Future[LoadResult] | None = None

    def follow(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for an announcement."""
        self.newest = self.announced.newest(timeout_s)

    def load_newest(self, host: VllmHost, worker: ThreadPoolExecutor) -> None:
        """Begin to load the newest version in the background, if it is due and none is loaded just
        now; and publish the outcome of one that has been loaded.

        A version is loaded again later if the copy was bad, so that the server stays on its
        version, or if the probe failed. Raises any other StreamrlError of the load.
        """
        if self._loading is not None and self._loading.done():
            loaded = self._loading
            self._loading = None
            self._finish_load(loaded, host)
        time_s = time.monotonic()
        if self._loading is None and self.newest and self.schedule.is_due(self.newest, time_s):
            self.schedule.on_attempt(self.newest)
            self._loading = worker.submit(host.load_version, self.newest, self.guest)

    def wait_for_load(self, timeout_s: float) -> None:
        """Wait for the version that is being loaded, if there is one."""
        if self._loading is not None:
            wait([self._loading], timeout_s)

    def _finish_load(self, job: Future[LoadResult], host: VllmHost) -> None:
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
            seed=host.seed,
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
