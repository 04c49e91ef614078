"""Keeps a bounded number of points of a series that grows with the length of a run."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """A sample of the points that were added: the first, the newest, and others evenly between.

    Up to `most` points, it has all of them. It never has more than `most + 1`.
    """

    def __init__(self, most: int) -> None:
        if most < 2:
            raise ValueError(f"most is {most}; it must be at least 2")
        self._most = most
        self._every = 1
        self._count = 0
        self._kept: list[T] = []
        self._newest: list[T] = []  # the newest point, if it is not one of those in `_kept`

    def add(self, point: T) -> None:
        """Add a point. When there are too many, every second one is dropped."""
        if self._count % self._every == 0:
            self._kept.append(point)
            self._newest = []
        else:
            self._newest = [point]
        self._count += 1
        if len(self._kept) > self._most:
            self._newest = self._kept[-1:] if len(self._kept) % 2 == 0 else []
            del self._kept[1::2]
            self._every *= 2

    def points(self) -> list[T]:
        return [*self._kept, *self._newest]
