"""Whether a reward is as high as a goal: one rule for training, evaluation, curricula and
targets.
"""

from __future__ import annotations

# Rewards travel as float32, and are sums of weighted parts. One that is so near to a goal has
# reached it.
CLOSE = 1e-6


def reaches(reward: float, goal: float) -> bool:
    """reward >= goal - CLOSE * max(1, |goal|). A goal in float32 may be smaller by 6e-8 of it, and
    0.7 + 0.2 + 0.1 is 0.9999999999999999.
    """
    return reward >= goal - CLOSE * max(1.0, abs(goal))
