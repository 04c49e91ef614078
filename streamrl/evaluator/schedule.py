"""Which policy versions are evaluated in a run: every n-th, in order."""

from __future__ import annotations

from collections.abc import Container, Iterable


def due(
    announced: Iterable[int], every: int, done: Container[int], stored: Container[int]
) -> int | None:
    """The first version that is to be evaluated, has not been, and whose weights are there; None
    when there is none now.
    """
    wanted = (version for version in sorted(announced) if every and version % every == 0)
    return next((version for version in wanted if version not in done and version in stored), None)


def missed(
    announced: Iterable[int], every: int, done: Container[int], stored: Container[int]
) -> list[int]:
    """Those that never will be: their weights are deleted."""
    return [
        version
        for version in sorted(announced)
        if every and version % every == 0 and version not in done and version not in stored
    ]
