"""Rewards of one group to advantages: how much better each rollout did than its peers.

Each function maps `rewards`: (group,) float32 to (group,) float32 and is pure. Your own: name it MODULE:FUNCTION in the run file.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from streamrl.imports import import_path

Advantage = Callable[[np.ndarray], np.ndarray]
EPSILON = 1e-4  # keeps a group of equal rewards at 0 instead of 0/0


def rloo(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the mean of the others: A_i = r_i - sum_{j != i} r_j / (n - 1).

    `rewards`: (group,) float32. Returns (group,) float32. One reward gives 0. RLOO, arXiv:2402.14740.
    """
    n = len(rewards)
    if n < 2:
        return np.zeros(n, np.float32)
    exact = rewards.astype(np.float64)
    return ((n * exact - exact.sum()) / (n - 1)).astype(np.float32)


def grpo(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the group's mean, in units of its standard deviation: A_i = (r_i - mean) / (std + epsilon).

    `rewards`: (group,) float32. Returns (group,) float32. Equal rewards give 0. GRPO, arXiv:2402.03300.
    """
    exact = rewards.astype(np.float64)
    return ((exact - exact.mean()) / (exact.std() + EPSILON)).astype(np.float32) if len(rewards) else np.zeros(0, np.float32)


ADVANTAGES: dict[str, Advantage] = {"rloo": rloo, "grpo": grpo}


def advantage_named(name: str) -> Advantage:
    """The shipped function of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return ADVANTAGES.get(name) or import_path(name, "buffer.advantage", ADVANTAGES)
