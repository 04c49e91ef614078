"""The schedule of evaluations: every n-th version, in order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass


@dataclass
class EvalSchedule:
    """Which of the announced versions have to be evaluated."""

    every: int  # Each version that is divisible by it is evaluated; 0: none.
    done: dict[int, None]  # The versions that need no evaluation any more.

    def is_due(self, announced: Iterable[int]) -> bool:
        """Whether one of these versions has to be evaluated."""
        return any(True for _ in self._wanted(announced))

    def next(self, announced: Iterable[int], stored: Container[int]) -> int | None:
        """The first version that has to be evaluated and whose weights are `stored`, or None."""
        return next((version for version in self._wanted(announced) if version in stored), None)

    def skip_deleted(self, announced: Iterable[int], stored: Container[int]) -> list[int]:
        """Give up the versions whose weights have been deleted, and return them."""
        deleted = [version for version in self._wanted(announced) if version not in stored]
        self.done |= dict.fromkeys(deleted)
        return deleted

    def on_evaluated(self, version: int) -> None:
        """The version needs no evaluation any more: it has one, or its weights are damaged."""
        self.done[version] = None

    def _wanted(self, announced: Iterable[int]) -> Iterator[int]:
        for version in sorted(announced):
            if self.every and version % self.every == 0 and version not in self.done:
                yield version
