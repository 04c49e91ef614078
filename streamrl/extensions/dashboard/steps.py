"""The steps of a run, and counts by step.

A step is a policy version: step k lasts from the announcement of version k to that of version k +
1, and the learner trains on batch k in it. Every event belongs to the step in which it happened, by
its time in the log.

The newest steps are kept one by one. Older steps are merged into pieces of neighbouring steps, and
their values are those at the end of the piece: sums and counts are exact there, and of a curve the
last value is kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

RECENT = 2_048  # This many of the newest steps are kept one by one.
OLDER = 1_024  # Older steps are merged into at most this many pieces.
# Steps are merged when there are more than this. With twice OLDER, the cost of merging is a
# constant for each step.
MOST = RECENT + 2 * OLDER


def up_to(steps: Iterable[int], step: int | None) -> list[int]:
    """The steps that are not after `step`, or all of them if no step is given; ascending."""
    return sorted(each for each in steps if step is None or each <= step)


class StepCounter:
    """A count, with its value at the end of every step."""

    def __init__(self) -> None:
        self._steps = list[int]()  # ascending
        self._totals = list[int]()  # the count at the end of each step

    def add(self, step: int, count: int) -> None:
        """Count `count` more in `step`."""
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            self._steps.insert(at, step)
            self._totals.insert(at, self._totals[at - 1] if at else 0)
        # This is the last step only, unless the record comes late.
        for later in range(at, len(self._totals)):
            self._totals[later] += count

    def until(self, step: int | None) -> int:
        """The count at the end of `step`, or now if no step is given."""
        at = len(self._steps) if step is None else bisect_right(self._steps, step)
        return self._totals[at - 1] if at else 0

    def regroup(self, steps: Steps) -> None:
        """Keep only the counts at the ends of the pieces of `steps`."""
        totals = dict[int, int]()
        for step, total in zip(self._steps, self._totals, strict=True):
            totals[steps.end_of(step)] = total
        self._steps = list(totals)
        self._totals = list(totals.values())

    def __len__(self) -> int:
        return len(self._steps)


def thinned(
    versions: Sequence[int], width: int, recent: int = RECENT, older: int = OLDER
) -> tuple[list[int], int]:
    """Merge all but the newest `recent` of the ascending versions into at most `older` pieces.

    Returns the first version of each piece followed by the recent versions, and the new width.
    Versions whose quotient by the width is equal form a piece. The width is doubled until there are
    few enough pieces. So wider pieces consist of whole narrower ones, and it does not matter how
    often a run has been thinned.
    """
    split = max(0, len(versions) - recent)
    while True:
        first_of_piece = dict[int, int]()
        for version in versions[:split]:
            first_of_piece.setdefault(version // width, version)
        if len(first_of_piece) <= older:
            return [*first_of_piece.values(), *versions[split:]], width
        width *= 2


@dataclass
class Steps:
    """When the lead learner announced each policy version. Of a piece, only the first version is
    kept.
    """

    versions: list[int] = field(default_factory=list[int])  # ascending
    times_s: list[float] = field(default_factory=list[float])  # never descending
    width: int = 1  # the number of steps in a piece

    @property
    def first(self) -> int:
        """The first version, 0 before there is one."""
        return self.versions[0] if self.versions else 0

    @property
    def first_s(self) -> float | None:
        """When the first version was announced, None before there is one."""
        return self.times_s[0] if self.times_s else None

    def add(self, version: int, time_s: float) -> bool:
        """Add a version that was announced at `time_s`. Returns whether steps were merged.

        A version that is announced again changes nothing.
        """
        if self.versions and version <= self.versions[-1]:
            return False
        self.versions.append(version)
        # The times never descend, even if a clock has been set back.
        self.times_s.append(max([time_s, *self.times_s[-1:]]))
        if len(self.versions) <= MOST:
            return False
        starts_s = dict(zip(self.versions, self.times_s, strict=True))
        self.versions, self.width = thinned(self.versions, self.width)
        self.times_s = [starts_s[version] for version in self.versions]
        return True

    def at(self, time_s: float) -> int:
        """The last step of the piece at this time, -1 before the first version."""
        index = bisect_right(self.times_s, time_s)
        return self.end_of(self.versions[index - 1]) if index else -1

    def end_of(self, step: int) -> int:
        """The last step of the piece that `step` is in.

        This is `step` itself where steps are kept one by one. Everything before the first version
        is one piece.
        """
        index = bisect_right(self.versions, step)
        return self.versions[index] - 1 if index < len(self.versions) else step

    def shown(self, step: int | None) -> int | None:
        """The step that is shown if `step` is asked for: the last one of its piece. None is now."""
        return None if step is None else self.end_of(step)

    def start_of(self, step: int) -> int:
        """The first step of the piece that `step` is in."""
        index = bisect_right(self.versions, step)
        return self.versions[index - 1] if 0 < index < len(self.versions) else step

    def end_s(self, step: int) -> float:
        """When the piece of `step` ended, infinity for the newest."""
        index = bisect_right(self.versions, step)
        return self.times_s[index] if index < len(self.versions) else math.inf
