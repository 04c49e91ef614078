"""Rewards of one group to advantages: how much better each rollout did than its peers.

Each function maps `rewards`: (group,) float32 to (group,) float32 and is pure. A function that is
not shipped is named in the run file as MODULE:FUNCTION. What a method needs of a whole batch is
added by the batcher (`batcher/advantages.py`). docs/losses.md compares the methods.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from streamrl.config.choices import ADVANTAGES
from streamrl.config.plugins import import_choice

Advantage = Callable[[np.ndarray], np.ndarray]
EPSILON = 1e-4  # keeps a group of equal rewards at 0 instead of 0/0
ROUNDING = 1e-6  # an advantage of that size is rounding


def rloo(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the mean of the others: A_i = r_i - sum_{j != i} r_j / (n - 1).

    `rewards`: (group,) float32. Returns (group,) float32. One reward gives 0. RLOO,
    arXiv:2402.14740.
    """
    n = len(rewards)
    if n < 2:
        return np.zeros(n, np.float32)
    exact = rewards.astype(np.float64)
    return ((n * exact - exact.sum()) / (n - 1)).astype(np.float32)


def grpo(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the group's mean, in units of its standard deviation: A_i = (r_i - mean) /
    (std + epsilon).

    `rewards`: (group,) float32. Returns (group,) float32. Equal rewards give 0. GRPO,
    arXiv:2402.03300.
    """
    if not len(rewards):
        return np.zeros(0, np.float32)
    exact = rewards.astype(np.float64)
    return ((exact - exact.mean()) / (exact.std() + EPSILON)).astype(np.float32)


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the group's mean: A_i = r_i - mean. No group counts for more because its
    rewards are close to each other.

    `rewards`: (group,) float32. Returns (group,) float32. Dr. GRPO, arXiv:2503.20783.
    """
    if not len(rewards):
        return np.zeros(0, np.float32)
    exact = rewards.astype(np.float64)
    return (exact - exact.mean()).astype(np.float32)


def reinforce_plus_plus(rewards: np.ndarray) -> np.ndarray:
    """The reward itself: A_i = r_i. The batch gives the baseline and the scale
    (`batcher/advantages.py`).

    `rewards`: (group,) float32. Returns (group,) float32. REINFORCE++, arXiv:2501.03262.
    """
    return rewards.astype(np.float32)


def maxrl(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the group's mean, in units of the mean: A_i = (r_i - mean) / mean. Problems
    that are seldom solved count for more.

    It is made for rewards of 0 and 1, where the mean gradient is that of log P(solved) up to the
    term of order group - 1. `rewards`: (group,) float32. Returns (group,) float32; 0 where the mean
    is not above 0, or so close to 0 that it is rounding. MaxRL, arXiv:2602.02710.
    """
    if not len(rewards):
        return np.zeros(0, np.float32)
    exact = rewards.astype(np.float64)
    mean = exact.mean()
    if mean <= ROUNDING * np.abs(rewards).max():
        return np.zeros(len(rewards), np.float32)
    return ((exact - mean) / mean).astype(np.float32)


def check_advantages(advantages: np.ndarray, n: int, group_id: str = "") -> np.ndarray:
    """The result of an advantage function, as (n,) float32. Raises ValueError if it is not n finite
    numbers, naming the group if its id is given.
    """
    if advantages.shape != (n,) or not np.isfinite(advantages).all():
        group = f"group {group_id}: " if group_id else ""
        raise ValueError(
            f"{group}the advantage function returned {advantages!r}, expected {n} finite numbers"
        )
    return advantages.astype(np.float32, copy=False)


def has_nonzero_advantage(advantages: np.ndarray) -> bool:
    """Is there anything to learn from the group? `advantages`: (group,) float32. DAPO's dynamic
    sampling, arXiv:2503.14476, leaves the others out.
    """
    return bool((np.abs(advantages) > ROUNDING).any())


def advantage_named(name: str) -> Advantage:
    """The shipped function of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    targets = {shipped: choice.target for shipped, choice in ADVANTAGES.items()}
    return import_choice(name, "buffer.advantage", targets)
