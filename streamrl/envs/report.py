"""What the replicas of a process report: their metrics, and warnings in the log."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.envs.host import EnvHost, Finished
from streamrl.envs.replica import Replica, RolloutGroup
from streamrl.stream.log.meter import Meter
from streamrl.stream.records import Rollout
from streamrl.system.text import nearest_or_all

logger = logging.getLogger(__name__)

REPORT_S = 1.0
# Reports in a second and at a time: everybody who watches the run reads them.
REPORTS_PER_S = 200
REPORTS_AT_ONCE = 10
# Seconds without a demand after which the log has a warning, and again after as many.
NO_DEMAND_S = 5.0


class HostReport:
    """The reports of a process's replicas. Each is due once a second, or more rarely where there
    are more than REPORTS_PER_S.
    """

    def __init__(self, host: EnvHost) -> None:
        self._interval_s = max(REPORT_S, len(host.replicas) / REPORTS_PER_S)
        self._reports = {replica.producer: EnvReport() for replica in host.replicas}
        self._next = deque(host.replicas)  # the one reported longest ago first
        self._warned_s = time.monotonic()

    def count(self, finished: Sequence[Finished]) -> None:
        for replica, groups in finished:
            self._reports[replica.producer].count(groups)

    def publish(self, meter: Meter) -> list[Replica]:
        """Publish what is due, with warnings in the log. Returns the replicas it is of."""
        reported: list[Replica] = []
        while len(reported) < REPORTS_AT_ONCE:
            replica = self._next[0]
            report = self._reports[replica.producer]
            if report.elapsed_s < self._interval_s:
                break
            self._next.rotate(-1)
            meter.publish(report.metrics(replica), source=replica.source)
            report.warn(replica)
            self._reports[replica.producer] = report.next(replica)
            reported.append(replica)
        if reported:
            self._warn_of_silence()
        return reported

    def _warn_of_silence(self) -> None:
        if time.monotonic() - self._warned_s < NO_DEMAND_S:
            return
        waits = {name: report.waiting_s for name, report in self._reports.items()}
        waiting = [name for name, waiting_s in waits.items() if waiting_s >= NO_DEMAND_S]
        if waiting:
            self._warned_s = time.monotonic()
            others = f" and {len(waiting) - 1:,} more" if len(waiting) > 1 else ""
            longest_s = max(waits.values())
            logger.warning(
                "%s%s: no demand heard for %.0f s; is the batcher running?",
                waiting[0],
                others,
                longest_s,
            )


@dataclass
class EnvReport:
    """What was done since the last report."""

    waiting_s: float = 0.0  # how long there has been no demand
    started_s: float = field(default_factory=time.monotonic)
    rollouts: list[Rollout] = field(default_factory=list[Rollout])

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def count(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            self.rollouts += group.rollouts

    def metrics(self, replica: Replica) -> dict[str, float]:
        """The metrics by name (`run/monitoring/metric_names.py`)."""
        failed = sum(bool(rollout.failure) for rollout in self.rollouts)
        good = [rollout for rollout in self.rollouts if not rollout.failure]
        turns = [turn for rollout in good for turn in rollout.turns]
        values = {
            "env/groups_in_flight": float(len(replica.running)),
            "env/groups_outstanding": float(replica.limit.outstanding),
            "env/groups_capacity": float(replica.limit.capacity),
            "env/rollouts_per_s": len(self.rollouts) / self.elapsed_s,
            "env/failed": float(failed),
            "env/waiting_for_demand_s": self.waiting_s,
        }
        if replica.stats:
            values["env/left_out"] = float(replica.filtered_problems)
        recorder = replica.runner.recorder
        if recorder is not None:
            values["env/generation_s_kept"] = recorder.kept_s
            values["env/generation_s_lost"] = recorder.lost_s
        truncated = [rollout for rollout in good if rollout.truncated]
        limits = Counter(str(rollout.metadata.get("truncation", "")) for rollout in truncated)
        for limit, count in limits.items():
            values[f"env/truncated/{limit}"] = float(count)
        values["env/forks"] = float(sum(turn.fork for turn in turns))
        if good:
            values["env/reward_mean"] = sum(rollout.reward for rollout in good) / len(good)
        waits = [turn.inference_metadata.latency_s for turn in turns if turn.inference_metadata]
        if waits:
            values["env/request_s"] = sum(waits) / len(waits)
        return values

    def warn(self, replica: Replica) -> None:
        """Write to the log what a person should know by now."""
        failed = [rollout for rollout in self.rollouts if rollout.failure]
        if failed:
            logger.warning(
                "%s: %d of %d rollouts failed, the last: %s",
                replica.producer,
                len(failed),
                len(self.rollouts),
                failed[-1].failure,
            )
        unknown = self._unknown_reward(replica)
        if unknown:
            logger.warning("%s: %s", replica.producer, unknown)

    def next(self, replica: Replica) -> EnvReport:
        """The report that follows this one."""
        if replica.limit.demand or replica.running:
            return EnvReport()
        return EnvReport(self.waiting_s + self.elapsed_s)

    def _unknown_reward(self, replica: Replica) -> str:
        """A complaint about a weight, or a filter, for a reward that no rollout has; or nothing."""
        seen: dict[str, None] = {}
        for rollout in self.rollouts:
            seen |= dict.fromkeys(rollout.rewards)
        if not seen:
            return ""
        named = [(name, "reward_weights") for name in replica.runner.settings.reward_weights]
        if replica.stats and replica.stats.rules.reward:
            named.append((replica.stats.rules.reward, "pass_rate.reward"))
        for name, setting in named:
            if name not in seen:
                hint = nearest_or_all(name, seen)
                return f"envs.{replica.name}.{setting}: no rollout has earned a {name!r}; {hint}"
        return ""
