"""Where the time of a loop goes, by cause: pure in what the parts' metrics say. Times in seconds,
on one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

CAUSES = ("version", "weights", "share", "data", "log")


class Interval(NamedTuple):
    start: float
    end: float


class Made(NamedTuple):
    """A batch, as the batcher saw it: when it was built, and how long it had waited, first for all
    shares, then for one of them.
    """

    built: float
    data_s: float
    share_s: float

    @property
    def waits(self) -> dict[str, Interval]:
        alone = Interval(self.built - self.share_s, self.built)
        return {"share": alone, "data": Interval(alone.start - self.data_s, alone.start)}


class Spent(NamedTuple):
    """What a server's time had gone to by a moment; the three add up."""

    time: float
    asked_s: float
    paused_s: float
    idle_s: float


def overlap(one: Interval, others: Iterable[Interval]) -> list[Interval]:
    """The parts of `one` that others cover, in order, none twice."""
    parts = list[Interval]()
    reached = one.start
    for other in sorted(others):
        start = max(other.start, reached)
        end = min(other.end, one.end)
        if end > start:
            parts.append(Interval(start, end))
            reached = end
    return parts


def rest(one: Interval, parts: Sequence[Interval]) -> list[Interval]:
    """What is left of it without these, which come in order."""
    edges = [one.start, *(edge for part in parts for edge in part), one.end]
    return [
        Interval(start, end)
        for start, end in zip(edges[::2], edges[1::2], strict=True)
        if end > start
    ]


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(interval.end - interval.start for interval in intervals)


def waiting(
    idle: Interval, made: Made, swaps: Sequence[Interval], announced: float
) -> dict[str, float]:
    """Why the learner had nothing to do while it waited for a batch, in seconds by cause; they add
    up to the interval.

    `version`: the one that the batch is built after was still being written, until it was
    `announced`. `weights`: all servers stood still for a new version (`swaps`). Otherwise, as the
    batch was short: of one `share`, others being complete, or of `data` altogether. `log`: what is
    left, on the way from the learner to the batcher and back.
    """
    causes = {
        "version": [Interval(idle.start, announced)],
        "weights": swaps,
        **{name: [interval] for name, interval in made.waits.items()},
    }
    found = dict[str, float]()
    left = [idle]
    for cause, intervals in causes.items():
        parts = [overlap(one, intervals) for one in left]
        found[cause] = sum(map(seconds, parts))
        left = [piece for one, cut in zip(left, parts, strict=True) for piece in rest(one, cut)]
    return {**found, "log": seconds(left)}


def unasked(before: Spent, after: Spent, shares: Sequence[Interval]) -> dict[str, float]:
    """Why nobody asked a server between two looks, in seconds: a batch waited for one env's
    `share`, and the others had enough under way; or all had, for the learner had yet to train it
    (`demand`). Where in between it was idle is not known: as much as can be goes to the share.
    """
    idle_s = after.idle_s - before.idle_s
    share_s = min(idle_s, seconds(overlap(Interval(before.time, after.time), shares)))
    return {"share": share_s, "demand": idle_s - share_s}
