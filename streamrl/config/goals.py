"""Is a reward as high as a goal? The same answer in training, evaluation, curricula and targets."""

from __future__ import annotations

# rewards travel as float32, and are sums of weighted parts: what is so near to a goal has reached
# it
CLOSE = 1e-6


def reaches(reward: float, goal: float, close: float = CLOSE) -> bool:
    """reward >= goal - close * max(1, |goal|): float32 of a goal is up to 6e-8 of it below, and 0.7
    + 0.2 + 0.1 is 0.9999999999999999.
    """
    return reward >= goal - close * max(1.0, abs(goal))
