"""Bounds of what a rollout may be called and earn. The gateway refuses what exceeds them with an
error for the sender, and the buffer with a dead letter.
"""

from __future__ import annotations

MAX_ID = 256  # characters of a uid, a group id, a producer, a reward's name: they are remembered
MAX_REWARD_NAMES = 256  # of a rollout
MAX_REWARD = 1e18  # squares and sums of rewards up to it are finite in float32
