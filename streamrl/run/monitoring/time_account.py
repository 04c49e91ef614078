"""Where the time of the learner and of each server goes, by cause. Every second has one cause, so
the causes add up to the time that has passed. A pure fold of `metrics` and `policy-versions`.

An example. A step of 2 s: the learner waited 1 s for the batch, trained for 0.5 s and stood still
for 0.2 s while the version was copied. The rest, 0.3 s, is `other`. Of the wait, a swap of weights
took 0.4 s, and the batch lacked one env's share for the other 0.6 s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from streamrl.run.monitoring.time_causes import (
    BatchWait,
    Interval,
    ServerTime,
    unasked,
    waiting,
)
from streamrl.stream.records import Metric

LEARNER_CAUSES = {
    "training": "trains",
    "publishing": "stands still for a version",
    "version": "waits for a version",
    "weights": "waits for servers to load",
    "share": "waits for one env",
    "data": "waits for data",
    "log": "waits for the log",
    "other": "other",
}
"""What a learner does in its time, with a label of each."""
SERVER_CAUSES = {
    "sampling": "samples",
    "weights": "loads weights",
    "share": "idle, one env is slow",
    "demand": "idle, enough is under way",
}
"""What a server does in its time, with a label of each. It has no request in the last two."""
SHARE_WAIT = "batcher/waited_for_share_s/"
# What explains a step or a report of a server may be published a little later than it.
SETTLED_S = 2.0
KEPT = 64  # the newest batches, versions and swaps that are kept
MAX_REPORTS = 600  # of a server that wait for the batch in whose time they were made


@dataclass
class TimeAccount:
    """The seconds of the learner and of each server, by cause."""

    learner: str = ""  # the source of the steps that count; others may train on the same batches
    lookahead: int = 0  # batcher.lookahead: batch k is built after version k - lookahead
    learner_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEARNER_CAUSES, 0.0))
    servers_s: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    _now_s: float = 0.0  # of the newest metric
    _steps: deque[Metric] = field(default_factory=deque[Metric])  # not settled, in order
    _last_step: Metric | None = None  # the one before the first of them
    _batches: dict[int, BatchWait] = field(default_factory=dict[int, BatchWait])
    _announced: dict[int, float] = field(default_factory=dict[int, float])
    _swaps: dict[int, Interval] = field(default_factory=dict[int, Interval])
    _reports: dict[str, deque[ServerTime]] = field(default_factory=dict[str, deque[ServerTime]])

    def add_version(self, version: int, time_s: float) -> None:
        """A version was announced for the first time."""
        keep(self._announced, version, time_s)

    def add_metric(self, metric: Metric) -> None:
        """Take note of a metric of any part, and settle what is old enough."""
        values = metric.values
        step = metric.step
        if step is not None and "batcher/waited_for_data_s" in values:
            share_s = sum(value for name, value in values.items() if name.startswith(SHARE_WAIT))
            wait = BatchWait(metric.time_s, values["batcher/waited_for_data_s"], share_s)
            keep(self._batches, step, wait)
        if step is not None and "inference/swap_s" in values:
            self._on_swap(step, metric)
        if step is not None and "learner/step_s" in values and metric.source == self.learner:
            self._steps.append(metric)
        if "inference/idle_s" in values:
            self._on_report(metric)
        self._now_s = max(self._now_s, metric.time_s)
        built_s = max((wait.built for wait in self._batches.values()), default=0.0)
        self._settle(self._now_s - SETTLED_S, built_s)

    def finish(self) -> None:
        """Count what has not settled: nothing else will come."""
        self._settle(math.inf, math.inf)

    def _settle(self, until_s: float, built_s: float) -> None:
        """Count the steps that ended until `until_s`. Count the reports of servers until then that
        were made before the newest batch was built, at `built_s`: only then is known how long it
        waited for a share.
        """
        while self._steps and self._steps[0].time_s <= until_s:
            step = self._steps.popleft()
            if self._last_step is not None and self._last_step.step == (step.step or 0) - 1:
                self._count_step(step, self._last_step.time_s)
            self._last_step = step
        for server, reports in self._reports.items():
            while len(reports) > 1 and (
                reports[1].time <= min(until_s, built_s) or len(reports) > MAX_REPORTS
            ):
                self._count_report(server, reports.popleft(), reports[0])

    def _on_swap(self, version: int, metric: Metric) -> None:
        """A server has loaded a version. While any other is still sampling, no batch waits for the
        swap, so it is the time in which all of them were paused that counts.
        """
        values = metric.values
        announced = self._announced.get(version)
        if announced is None:
            return
        start = (
            announced + values.get("inference/heard_s", 0.0) + values.get("inference/pull_s", 0.0)
        )
        swap = Interval(start, start + load_pause_s(values))
        other = self._swaps.get(version, swap)
        keep(self._swaps, version, Interval(max(swap.start, other.start), min(swap.end, other.end)))

    def _on_report(self, metric: Metric) -> None:
        values = metric.values
        report = ServerTime(
            metric.time_s,
            values.get("inference/asked_s", 0.0),
            values.get("inference/paused_s", 0.0),
            values["inference/idle_s"],
        )
        reports = self._reports.setdefault(metric.source, deque())
        last = reports[-1] if reports else report
        if report.idle_s < last.idle_s or report.asked_s < last.asked_s:
            reports.clear()  # The server was started again, and counts from 0.
        reports.append(report)

    def _count_step(self, step: Metric, begun_s: float) -> None:
        """Count a step that began when the one before it ended."""
        assert step.step is not None
        values = step.values
        total_s = max(step.time_s - begun_s, 0.0)
        spent = {
            "training": values["learner/step_s"],
            "publishing": values.get("learner/publish_s", 0.0),
        }
        idle = Interval(begun_s, begun_s + values.get("learner/idle_s", 0.0))
        wait = self._batches.get(step.step, BatchWait(begun_s, 0.0, 0.0))
        announced = self._announced.get(max(step.step - self.lookahead, 0), begun_s)
        swaps = [swap for swap in self._swaps.values() if swap.end > swap.start]
        spent |= waiting(idle, wait, swaps, announced)
        spent["other"] = max(total_s - sum(spent.values()), 0.0)
        add(self.learner_s, spent)

    def _count_report(self, server: str, before: ServerTime, after: ServerTime) -> None:
        shares = [wait.intervals["share"] for wait in self._batches.values()]
        causes = self.servers_s.setdefault(server, dict.fromkeys(SERVER_CAUSES, 0.0))
        asked_s = after.asked_s - before.asked_s
        paused_s = after.paused_s - before.paused_s
        idle = unasked(before, after, shares)
        add(causes, {"sampling": asked_s, "weights": paused_s, **idle})


def load_pause_s(values: Mapping[str, float]) -> float:
    """The time for which a server was paused to load a version, by the metrics of that load. An
    adapter is loaded while the server samples on.
    """
    is_adapter = values.get("inference/pause_s") == 0.0
    return 0.0 if is_adapter else values["inference/swap_s"]


Kept = TypeVar("Kept")


def keep(kept: dict[int, Kept], number: int, value: Kept) -> None:
    """Keep a value by its number, and only the newest KEPT of them."""
    kept[number] = value
    while len(kept) > KEPT:
        del kept[min(kept)]


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add seconds by cause to a total."""
    for cause, spent_s in more.items():
        total[cause] += spent_s


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """The share of each cause in all seconds; 0 where none are counted yet."""
    total_s = sum(seconds.values())
    return {cause: spent_s / total_s if total_s else 0.0 for cause, spent_s in seconds.items()}
