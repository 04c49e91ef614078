"""How old a rollout may be. The one place that decides: buffer and batcher both ask here.

Batch k is trained at policy version k and gives version k + 1. A rollout is as old as its oldest
token.
"""

# a rollout from a version not heard of yet is held, up to so far ahead; a deep pipeline allows for
# more
FUTURE_VERSIONS = 8


def furthest(lookahead: int) -> int:
    """How far ahead of what the buffer has heard a rollout may be: what is built already, and what
    is held, may be trained on before it hears.
    """
    return FUTURE_VERSIONS + 2 * max(lookahead - 1, 0)


def age(batch: int, oldest_version: int) -> int:
    """Age in batch `batch` of a rollout whose oldest token was sampled by `oldest_version`."""
    return batch - oldest_version


def fresh(batch: int, oldest_version: int, max_age: int) -> bool:
    """May batch `batch` take it? With max_age 1, batch 2 may take versions 1 and 2."""
    return age(batch, oldest_version) <= max_age


def last_chance(announced: int, oldest_version: int, max_age: int) -> bool:
    """Would it be too old for the batch after number `announced`?"""
    return not fresh(announced + 1, oldest_version, max_age)
