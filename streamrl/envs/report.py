"""What a replica reports once a second: its metrics, and warnings in its log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.envs.replica import Replica, RolloutGroup
from streamrl.stream.records import Rollout
from streamrl.system.text import nearest_or_all

logger = logging.getLogger(__name__)

# Seconds without a demand after which the log has a warning, and again after as many.
NO_DEMAND_S = 5.0


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
        """The report that follows this one. It warns if there has been no demand for long."""
        if replica.limit.demand or replica.running:
            return EnvReport()
        waiting_s = self.waiting_s + self.elapsed_s
        if waiting_s // NO_DEMAND_S > self.waiting_s // NO_DEMAND_S:
            logger.warning(
                "%s: no demand heard for %.0f s; is the batcher running?",
                replica.producer,
                waiting_s,
            )
        return EnvReport(waiting_s)

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
