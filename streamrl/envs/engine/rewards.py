"""Many named rewards to one scalar, and to what each turn and token has earned: weights are the run
file's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from streamrl.envs.api import Earned, Judged

T = TypeVar("T")


class Linear(NamedTuple):
    """What is published of a rollout's rewards. `reward` is made of everything below, each by its
    weight.
    """

    reward: float
    totals: dict[str, float]  # by name, over the whole rollout, before weights
    turns: list[dict[str, float]]  # by name, of each turn, before weights
    turn_rewards: list[float]  # of each turn, weighted
    # (sampled tokens,) float32 of each turn, weighted; None where tokens earned nothing of their
    # own
    token_rewards: list[np.ndarray | None]


def leveled(judged: float | Judged, name: str = "") -> Earned:
    """Whatever a reward function may return, at its levels; a number goes by `name`."""
    if isinstance(judged, Earned):
        return judged
    return Earned(rollout=judged if isinstance(judged, Mapping) else {name: judged})


def totals(earned: Earned) -> dict[str, float]:
    """By name, over all levels: a turn's and a token's count for the rollout."""
    found: dict[str, float] = {}
    for named in (earned.rollout, *earned.turns):
        for name, value in named.items():
            found[name] = found.get(name, 0.0) + float(value)
    for named in earned.tokens:
        for name, values in named.items():
            found[name] = found.get(name, 0.0) + float(np.sum(np.asarray(values, np.float64)))
    return found


def together(one: Earned, other: Earned) -> Earned:
    """Both. Raises ValueError for a name that both have: its weight could not tell them apart."""
    if twice := sorted(totals(one).keys() & totals(other).keys()):
        raise ValueError(
            f"two reward functions give {twice[0]!r}; give the one of the run file another name"
        )
    turns, tokens = _merged(one.turns, other.turns), _merged(one.tokens, other.tokens)
    return Earned({**one.rollout, **other.rollout}, turns, tokens, {**one.weights, **other.weights})


def linearise(earned: Earned, weights: Mapping[str, float], lengths: Sequence[int]) -> Linear:
    """reward = sum over names of weight x total; a name without a weight has the env's own, or
    counts for 1.

    `lengths`: sampled tokens of each turn of the policy. Raises ValueError where levels do not fit
    the turns, or turns' tokens.
    """
    if (earned.turns and len(earned.turns) != len(lengths)) or (
        earned.tokens and len(earned.tokens) != len(lengths)
    ):
        raise ValueError(
            f"rewards of {len(earned.turns)} turns and tokens of {len(earned.tokens)}, where the policy had {len(lengths)}"
        )
    weights, by_name = {**earned.weights, **weights}, totals(earned)
    turns = [{name: float(value) for name, value in turn.items()} for turn in earned.turns] or [
        {} for _ in lengths
    ]
    tokens = earned.tokens or [{} for _ in lengths]
    return Linear(
        reward=sum(weights.get(name, 1.0) * value for name, value in by_name.items()),
        totals=by_name,
        turns=turns,
        turn_rewards=[
            sum(weights.get(name, 1.0) * value for name, value in turn.items()) for turn in turns
        ],
        token_rewards=[
            _of_tokens(named, weights, length)
            for named, length in zip(tokens, lengths, strict=True)
        ],
    )


def _of_tokens(
    named: Mapping[str, Sequence[float]], weights: Mapping[str, float], length: int
) -> np.ndarray | None:
    for name, values in named.items():
        if len(values) != length:
            raise ValueError(
                f"reward {name!r} has {len(values)} numbers for a turn of {length} tokens"
            )
    if not named:
        return None
    return np.sum(
        [weights.get(name, 1.0) * np.asarray(values, np.float64) for name, values in named.items()],
        axis=0,
    ).astype(np.float32)


def _merged(one: Sequence[Mapping[str, T]], other: Sequence[Mapping[str, T]]) -> list[dict[str, T]]:
    """Turn by turn; a level that one of them does not speak of is the other's."""
    if not one or not other:
        return [dict(turn) for turn in one or other]
    if len(one) != len(other):
        raise ValueError(f"one reward function judges {len(one)} turns, another {len(other)}")
    return [{**a, **b} for a, b in zip(one, other, strict=True)]
