"""How old a rollout may be. This file decides; the buffer and the batcher both ask here.

Batch k is trained at policy version k and gives version k + 1. A rollout is as old as its oldest
token.
"""

# The buffer holds a rollout of a version that is not announced yet, up to so many versions ahead of
# the newest announced one. A deep pipeline allows for more (`max_future_versions`).
FUTURE_VERSIONS = 8


def max_future_versions(lookahead: int) -> int:
    """How many versions a rollout may be ahead of the newest one that the buffer has heard of.
    Batches that are built already, and those that are held, may be trained on before it hears.
    """
    return FUTURE_VERSIONS + 2 * max(lookahead - 1, 0)


def staleness(batch: int, oldest_version: int) -> int:
    """Age, in batch number `batch`, of a rollout whose oldest token is of `oldest_version`."""
    return batch - oldest_version


def is_fresh(batch: int, oldest_version: int, max_age: int) -> bool:
    """May batch number `batch` take it? With max_age 1, batch 2 may take versions 1 and 2."""
    return staleness(batch, oldest_version) <= max_age


def expires_next(announced: int, oldest_version: int, max_age: int) -> bool:
    """Would the rollout be too old for the batch after number `announced`?"""
    return not is_fresh(announced + 1, oldest_version, max_age)
