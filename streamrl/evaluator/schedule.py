"""The schedule of evaluations: every n-th version, in order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator


def due(
    announced: Iterable[int], every: int, done: Container[int], stored: Container[int]
) -> int | None:
    """The first version that has to be evaluated and whose weights are in the store, or None.

    `announced`: all announced versions. `every`: each version that is divisible by it is evaluated;
    0: none. `done`: the versions that need no evaluation any more. `stored`: those with weights.
    """
    coming = _wanted(announced, every, done)
    return next((version for version in coming if version in stored), None)


def missed(
    announced: Iterable[int], every: int, done: Container[int], stored: Container[int]
) -> list[int]:
    """The versions that can no longer be evaluated because their weights have been deleted. The
    arguments are those of `due`.
    """
    return [version for version in _wanted(announced, every, done) if version not in stored]


def _wanted(announced: Iterable[int], every: int, done: Container[int]) -> Iterator[int]:
    for version in sorted(announced):
        if every and version % every == 0 and version not in done:
            yield version
