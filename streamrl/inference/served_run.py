"""A run whose newest version a server has: the run that the server belongs to, or a guest, which is
another run on the same base (inference.also_serves).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.config.run_file import RunFile
from streamrl.inference.load_schedule import LoadSchedule
from streamrl.inference.registration import Registration, finish_swap
from streamrl.inference.version_follower import VersionFollower
from streamrl.inference.vllm_host import LoadResult, VllmHost
from streamrl.log.meter import Meter
from streamrl.records import PolicyVersion


@dataclass(kw_only=True, eq=False)
class ServedRun:
    """What a server reads of one run, and says in it."""

    guest: str = ""  # name of the run; empty: the server's own
    announced: VersionFollower
    entry: Registration
    meter: Meter
    schedule: LoadSchedule = field(default_factory=LoadSchedule)
    newest: PolicyVersion | None = None  # the last that was read
    attempted_s: float = -math.inf  # when a version was last loaded, monotonic

    def follow(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for an announcement."""
        self.newest = self.announced.newest(timeout_s)

    def is_due(self, time_s: float) -> bool:
        return self.newest is not None and self.schedule.is_due(self.newest, time_s)


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


def finish_load(run: RunFile, loading: Loading, host: VllmHost) -> None:
    """Publish the outcome of loading a version. If it failed, the version is loaded again later.

    `run` is the file of the run that the server belongs to. Raises what `finish_swap` does.
    """
    served = loading.run
    tolerance = run.inference.probe_tolerance
    if finish_swap(loading.job, host, served.entry, served.meter, tolerance, run.probe_rounds):
        served.schedule.on_success()
    else:
        served.schedule.on_failure(time.monotonic())
