"""Statistics of the rollouts that came in from an env between two policy versions: the `replays/`
metrics.

They are part of the buffer's state, so the names of the fields are in snapshots and stay.
"""

from __future__ import annotations

import math

import msgspec

from streamrl.stream.records import Rollout
from streamrl.stream.records.limits import MAX_REWARD_NAMES

# A rollout of at least so many tokens that were all sampled with probability 1 is suspicious.
SUSPICIOUS_TOKENS = 8


class RunningStats(msgspec.Struct):
    """Sums from which a mean and a standard deviation follow."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the population: the sum of squares is divided by n."""
        if not self.count:
            return 0.0
        return math.sqrt(max(self.squares / self.count - self.mean**2, 0.0))


class IntakeStats(msgspec.Struct):
    """Counts over the rollouts of one env since the last policy version."""

    rollouts: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    truncated: int = 0
    failed: int = 0
    zero_advantage_groups: int = 0  # groups whose advantages are all 0
    misaligned: int = 0
    suspicious: int = 0  # rollouts whose logprobs are all exactly 0
    crowded_out: int = 0  # groups that a full window closed below their minimum
    unscored: str = ""  # why the last group that could not be scored could not
    reward: RunningStats = msgspec.field(default_factory=RunningStats)
    rewards: dict[str, RunningStats] = {}  # by name

    def add(self, rollout: Rollout, tokens: int) -> None:
        """Count a rollout. `tokens`: of all its turns."""
        if rollout.misaligned:
            self.misaligned += 1
            return
        if rollout.failure:
            self.failed += 1
            return
        self.rollouts += 1
        self.tokens += tokens
        self.generated_tokens += rollout.sampled_tokens
        self.truncated += rollout.truncated
        self.suspicious += is_suspicious(rollout)
        self.reward.add(rollout.reward)
        for name, value in rollout.rewards.items():
            if name in self.rewards or len(self.rewards) < MAX_REWARD_NAMES:
                self.rewards.setdefault(name, RunningStats()).add(value)

    def metrics(self, env: str) -> dict[str, float]:
        """The metrics of this env, those under `replays/` in docs/metrics.md."""
        prefix = f"replays/{env}/"
        frac_truncated = self.truncated / self.rollouts if self.rollouts else 0.0
        values = {
            prefix + "new_rollouts": float(self.rollouts),
            prefix + "new_tokens": float(self.tokens),
            prefix + "new_generated_tokens": float(self.generated_tokens),
            prefix + "frac_truncated": frac_truncated,
            prefix + "new_failed": float(self.failed),
            prefix + "zero_advantage_groups": float(self.zero_advantage_groups),
            prefix + "new_misaligned": float(self.misaligned),
            prefix + "suspicious_logprobs": float(self.suspicious),
        }
        rewards = {"reward": self.reward}
        for name, stats in self.rewards.items():
            rewards[f"rewards/{name}"] = stats
        for name, stats in rewards.items():
            if stats.count:
                values[f"{prefix}{name}/mean"] = stats.mean
                values[f"{prefix}{name}/std"] = stats.std
        return values


def is_suspicious(rollout: Rollout) -> bool:
    """Is every logprob exactly 0? A policy may be as sure as that, but a client that does not ask
    for logprobs sends the same.
    """
    sampled = [turn.logprobs for turn in rollout.turns if turn.logprobs is not None]
    # Looking at one value answers for nearly every rollout.
    if sampled and sampled[0].size and sampled[0].item(0):
        return False
    if sum(len(logprobs) for logprobs in sampled) < SUSPICIOUS_TOKENS:
        return False
    return not any(logprobs.any() for logprobs in sampled)
