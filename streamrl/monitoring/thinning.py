"""Summaries of a fixed size of what grows with the length of a run."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """The first of the points that are added, every so many of the others, and the newest: all of
    them while they are `most` or fewer, and never more than one above `most`.
    """

    def __init__(self, most: int) -> None:
        if most < 2:
            raise ValueError(f"most is {most}; it must be at least 2")
        self._most = most
        self._every = 1
        self._count = 0
        self._kept: list[T] = []
        self._newest: list[T] = []  # the newest point, where it is not among those that are kept

    def add(self, point: T) -> None:
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
