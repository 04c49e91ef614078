"""Named rewards of a rollout, of its turns and of its tokens, and the weighted sums that train. The
weights are those of the run file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import structs

from streamrl.stream.records import Turn

T = TypeVar("T")


class RewardBreakdown(NamedTuple):
    """Named rewards at three levels. The total of a name over all levels is what its metric shows
    and what its weight multiplies.
    """

    rollout: Mapping[str, float] = {}  # rewards of the whole rollout
    # One map for each turn of the policy: rewards of the conversation up to the end of that turn.
    turns: Sequence[Mapping[str, float]] = ()
    # One map for each turn, with one number for each sampled token: rewards of the text up to
    # that token.
    tokens: Sequence[Mapping[str, Sequence[float]]] = ()
    # The weights of names to which the run file gives none. A name without any weight counts 1.
    weights: Mapping[str, float] = {}


class WeightedRewards(NamedTuple):
    """The rewards of a rollout as they are published. `reward` is the weighted sum of them."""

    reward: float
    totals: dict[str, float]  # by name, over the whole rollout, before weights
    turns: list[dict[str, float]]  # of each turn, by name, before weights
    turn_rewards: list[float]  # of each turn, weighted
    # (sampled tokens,) float32 for each turn, weighted. None if no token of the turn earned
    # anything itself.
    token_rewards: list[np.ndarray | None]

    def in_order(self, turns: Sequence[int]) -> WeightedRewards:
        """The same with the turns in this order, given by their numbers."""
        return self._replace(
            turns=[self.turns[turn] for turn in turns],
            turn_rewards=[self.turn_rewards[turn] for turn in turns],
            token_rewards=[self.token_rewards[turn] for turn in turns],
        )


def normalize(
    result: float | Mapping[str, float] | RewardBreakdown, name: str = ""
) -> RewardBreakdown:
    """Whatever a reward function may return, as a breakdown. A number goes by `name`."""
    if isinstance(result, RewardBreakdown):
        return result
    if isinstance(result, Mapping):
        return RewardBreakdown(rollout=result)
    return RewardBreakdown(rollout={name: result})


def totals(rewards: RewardBreakdown) -> dict[str, float]:
    """The sum of each name over all levels: rewards of turns and tokens count for the rollout."""
    sums: dict[str, float] = {}
    for by_name in (rewards.rollout, *rewards.turns):
        for name, value in by_name.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    for by_name in rewards.tokens:
        for name, values in by_name.items():
            sums[name] = sums.get(name, 0.0) + float(np.sum(np.asarray(values, np.float64)))
    return sums


def merge(one: RewardBreakdown, other: RewardBreakdown) -> RewardBreakdown:
    """Both breakdowns as one. Raises ValueError for a name that both have, because a weight could
    not tell them apart.
    """
    twice = sorted(totals(one).keys() & totals(other).keys())
    if twice:
        raise ValueError(
            f"two reward functions give {twice[0]!r}; give the one of the run file another name"
        )
    return RewardBreakdown(
        rollout={**one.rollout, **other.rollout},
        turns=_merge_turns(one.turns, other.turns),
        tokens=_merge_turns(one.tokens, other.tokens),
        weights={**one.weights, **other.weights},
    )


def apply_weights(
    rewards: RewardBreakdown, weights: Mapping[str, float], turn_lengths: Sequence[int]
) -> WeightedRewards:
    """reward = sum over names of weight x total. A name to which `weights` gives none has the env's
    own weight, or 1.

    `turn_lengths`: the number of sampled tokens of each turn of the policy. Raises ValueError if
    the levels do not fit the turns, or the tokens of a turn.
    """
    turn_count = len(turn_lengths)
    if len(rewards.turns) not in (0, turn_count) or len(rewards.tokens) not in (0, turn_count):
        raise ValueError(
            f"rewards of {len(rewards.turns)} turns and tokens of {len(rewards.tokens)}, where the "
            f"policy had {turn_count}"
        )
    weights = {**rewards.weights, **weights}
    by_name = totals(rewards)
    turns = [
        {name: float(value) for name, value in turn.items()}
        for turn in rewards.turns or [{}] * turn_count
    ]
    token_rewards = [
        _weighted_tokens(tokens, weights, length)
        for tokens, length in zip(rewards.tokens or [{}] * turn_count, turn_lengths, strict=True)
    ]
    return WeightedRewards(
        reward=_weighted_sum(by_name, weights),
        totals=by_name,
        turns=turns,
        turn_rewards=[_weighted_sum(turn, weights) for turn in turns],
        token_rewards=token_rewards,
    )


def with_rewards(turns: Sequence[Turn], rewards: WeightedRewards) -> list[Turn]:
    """The turns, each of the policy's with what it earned. If the policy had only one turn, that
    turn has earned all that the rollout has.
    """
    rewarded: list[Turn] = []
    number = 0  # of the policy's turn
    is_only_turn = len(rewards.turn_rewards) == 1
    for turn in turns:
        if turn.logprobs is None:
            rewarded.append(turn)
            continue
        token_rewards = rewards.token_rewards[number]
        by_tokens = 0.0 if token_rewards is None else float(token_rewards.sum(dtype="f8"))
        by_name = rewards.turns[number]
        reward = rewards.turn_rewards[number] or None
        if is_only_turn:
            reward = rewards.reward - by_tokens
            if token_rewards is None:
                by_name = rewards.totals
        rewarded.append(
            structs.replace(turn, rewards=by_name, token_rewards=token_rewards, reward=reward)
        )
        number += 1
    return rewarded


def _weighted_sum(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights.get(name, 1.0) * value for name, value in values.items())


def _weighted_tokens(
    by_name: Mapping[str, Sequence[float]], weights: Mapping[str, float], length: int
) -> np.ndarray | None:
    """The weighted rewards of the tokens of one turn: (length,) float32; None without any."""
    weighted: list[np.ndarray] = []
    for name, values in by_name.items():
        if len(values) != length:
            raise ValueError(
                f"reward {name!r} has {len(values)} numbers for a turn of {length} tokens"
            )
        weighted.append(weights.get(name, 1.0) * np.asarray(values, np.float64))
    return np.sum(weighted, axis=0).astype(np.float32) if weighted else None


def _merge_turns(
    one: Sequence[Mapping[str, T]], other: Sequence[Mapping[str, T]]
) -> list[dict[str, T]]:
    """Turn by turn. If only one of them has this level, it is that one's."""
    if not one or not other:
        return [dict(turn) for turn in one or other]
    if len(one) != len(other):
        raise ValueError(f"one reward function judges {len(one)} turns, another {len(other)}")
    return [{**a, **b} for a, b in zip(one, other, strict=True)]
