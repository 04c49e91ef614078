"""Events in the order of their times: what a simulation runs on."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Timeline:
    """The time of a simulation, and what will happen in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events = list[tuple[float, int, Callable[[], None]]]()
        self._count = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do this later. Of actions at one time the one that was given first comes first."""
        self._count += 1
        heappush(self._events, (self.now_s + max(delay_s, 0.0), self._count, action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Do one action after another until `is_over`, or until there is none."""
        while self._events and not is_over():
            self.now_s, _, action = heappop(self._events)
            action()
