"""The schedule of evaluations: every n-th version, in order."""

from __future__ import annotations

from collections.abc import Container, Iterable


def due(
    announced: Iterable[int], every: int, done: Container[int], stored: Container[int]
) -> int | None:
    """The first version that has to be evaluated and whose weights are in the store, or None."""
    wanted = (version for version in sorted(announced) if every and version % every == 0)
    return next((version for version in wanted if version not in done and version in stored), None)


def missed(
    announced: Iterable[int], every: int, done: Container[int], stored: Container[int]
) -> list[int]:
    """Versions that can no longer be evaluated, because their weights have been deleted."""
    return [
        version
        for version in sorted(announced)
        if every and version % every == 0 and version not in done and version not in stored
    ]
