"""Why a learner and a server had nothing to do, second by second: pure functions of what the parts'
metrics tell. Times are in seconds, on one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    start: float
    end: float


class BatchWait(NamedTuple):
    """When a batch was built, and how long it had waited: first for all shares, then for one."""

    built: float
    data_s: float
    share_s: float

    @property
    def intervals(self) -> dict[str, Interval]:
        """When it waited, by cause."""
        share = Interval(self.built - self.share_s, self.built)
        return {"share": share, "data": Interval(share.start - self.data_s, share.start)}


class ServerTime(NamedTuple):
    """What the time of a server's life had gone to at a moment. The three add up to its life."""

    time: float
    asked_s: float
    paused_s: float
    idle_s: float


def overlap(one: Interval, others: Iterable[Interval]) -> list[Interval]:
    """The pieces of `one` that the others cover: in order, and none twice."""
    pieces = list[Interval]()
    reached = one.start
    for other in sorted(others):
        start = max(other.start, reached)
        end = min(other.end, one.end)
        if end > start:
            pieces.append(Interval(start, end))
            reached = end
    return pieces


def remainder(one: Interval, pieces: Sequence[Interval]) -> list[Interval]:
    """What is left of `one` without these pieces of it, which come in order."""
    edges = [one.start, *(edge for piece in pieces for edge in piece), one.end]
    return [
        Interval(start, end)
        for start, end in zip(edges[::2], edges[1::2], strict=True)
        if end > start
    ]


def seconds(intervals: Iterable[Interval]) -> float:
    """The length of all intervals together."""
    return sum(interval.end - interval.start for interval in intervals)


def waiting(
    idle: Interval, wait: BatchWait, swaps: Sequence[Interval], announced: float
) -> dict[str, float]:
    """Why the learner waited for a batch, in seconds by cause. They add up to `idle`.

    - version: the one that the batch is built after was being written, until it was `announced`.
    - weights: the servers were paused for a new version (`swaps`).
    - share: the batch lacked one share, and the others were complete.
    - data: the batch lacked all shares.
    - log: the rest, which is the way from the learner to the batcher and back.
    """
    intervals = {
        "version": [Interval(idle.start, announced)],
        "weights": swaps,
        **{cause: [interval] for cause, interval in wait.intervals.items()},
    }
    causes = dict[str, float]()
    left = [idle]
    for cause, covered in intervals.items():
        pieces = [overlap(one, covered) for one in left]
        causes[cause] = sum(map(seconds, pieces))
        left = [rest for one, cut in zip(left, pieces, strict=True) for rest in remainder(one, cut)]
    return {**causes, "log": seconds(left)}


def unasked(before: ServerTime, after: ServerTime, shares: Sequence[Interval]) -> dict[str, float]:
    """Why a server had no request between two reports, in seconds by cause.

    - share: a batch waited for one share, in these intervals, and all other envs had enough under
      way. When between the reports the server was idle is not known, so as much as possible counts
      here.
    - demand: all envs had enough under way, because the learner had yet to train on it.
    """
    idle_s = after.idle_s - before.idle_s
    share_s = min(idle_s, seconds(overlap(Interval(before.time, after.time), shares)))
    return {"share": share_s, "demand": idle_s - share_s}
