"""What came in from an env between two policy versions: which rollouts are refused, and the `replays/` metrics of document 001 over the others."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from streamrl.buffer.groups import generated_tokens
from streamrl.records import Rollout

REWARD_LIMIT = 1e18  # squares and sums of rewards up to it are finite in float32
TEMPERATURES = (1e-6, 1e6)


def objection(rollout: Rollout, key: str, environment: str, newest_version: int, vocab_size: int = 0) -> str:
    """Why this readable rollout cannot be used, in a line; empty when it can.

    `newest_version` is the furthest ahead that is held; `vocab_size` bounds token ids, 0 if nobody has said it.
    """
    if rollout.environment != environment:
        return f"rollout says environment {rollout.environment!r} but lies in rollouts.{environment}"
    if key != rollout.group_id:
        return f"key {key!r} is not the rollout's group_id {rollout.group_id!r}: its group would be split over partitions"
    if rollout.newest_policy_version > newest_version:
        return f"policy version {rollout.newest_policy_version} is further ahead than {newest_version}: nobody has announced it"
    if max(map(abs, _rewards(rollout))) > REWARD_LIMIT:
        return f"a reward is larger than {REWARD_LIMIT:g}: its group could not be scored"
    if not TEMPERATURES[0] <= rollout.temperature <= TEMPERATURES[1]:
        return f"temperature {rollout.temperature:g} is not within {TEMPERATURES[0]:g} and {TEMPERATURES[1]:g}"
    for turn in rollout.turns:
        if vocab_size and turn.tokens is not None and len(turn.tokens) and (largest := _largest(turn.tokens)) >= vocab_size:
            return f"token id {largest} is not in the policy's vocabulary of {vocab_size}"
        how = turn.inference_metadata
        if how is not None and turn.logprobs is not None and (how.top_p < 1 or how.top_k > 0):
            return f"sampled with top_p {how.top_p} and top_k {how.top_k}: the learner reproduces temperature only; sample with top_p 1 and top_k -1"
    return ""


def _largest(tokens: np.ndarray) -> int:
    return tokens.item(tokens.argmax())  # a third of the time that max takes, at every rollout


def _rewards(rollout: Rollout) -> list[float]:
    """Every single one: of the rollout, of its turns, and the largest of a turn's tokens."""
    found = [rollout.reward, *rollout.rewards.values()]
    for turn in rollout.turns:
        found += [turn.reward or 0.0, *turn.rewards.values()]
        if turn.token_rewards is not None and turn.token_rewards.size:
            found.append(float(np.abs(turn.token_rewards).max()))
    return found


class Moments(msgspec.Struct):
    """Sums from which mean and standard deviation follow."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count, self.total, self.squares = self.count + 1, self.total + value, self.squares + value * value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Of the population: divided by n."""
        return math.sqrt(max(self.squares / self.count - self.mean**2, 0.0)) if self.count else 0.0


class Intake(msgspec.Struct):
    """Counts over the rollouts of one env since the last version."""

    rollouts: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    truncated: int = 0
    failed: int = 0
    flat_groups: int = 0
    misaligned: int = 0
    reward: Moments = msgspec.field(default_factory=Moments)
    rewards: dict[str, Moments] = {}

    def count(self, rollout: Rollout, tokens: int) -> None:
        """`tokens`: of all its turns."""
        if rollout.misaligned:
            self.misaligned += 1
            return
        if rollout.failure:
            self.failed += 1
            return
        self.rollouts += 1
        self.tokens += tokens
        self.generated_tokens += generated_tokens(rollout)
        self.truncated += rollout.truncated
        self.reward.add(rollout.reward)
        for name, value in rollout.rewards.items():
            self.rewards.setdefault(name, Moments()).add(value)

    def values(self, env: str) -> dict[str, float]:
        """By the names of document 001."""
        named = {f"rewards/{name}": moments for name, moments in self.rewards.items()}
        over = {
            f"{name}/{what}": value
            for name, m in {"reward": self.reward, **named}.items()
            for what, value in (("mean", m.mean), ("std", m.std))
            if m.count
        }
        counts = {
            "new_rollouts": float(self.rollouts),
            "new_tokens": float(self.tokens),
            "new_generated_tokens": float(self.generated_tokens),
            "frac_truncated": self.truncated / self.rollouts if self.rollouts else 0.0,
            "new_failed": float(self.failed),
            "zero_advantage_groups": float(self.flat_groups),
            "new_misaligned": float(self.misaligned),
        }
        return {f"replays/{env}/{name}": value for name, value in {**counts, **over}.items()}
