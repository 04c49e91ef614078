"""Pauses of a run: longer than usual between two batches. Those that something explains that was
done to the run, and those that nothing explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

PAUSE_S = 5.0
RETURN_S = 15.0  # after the cause is gone, within which there must be a batch again


class Incident(NamedTuple):
    """Something that was done to the run."""

    what: str
    start_s: float
    over_s: float  # when its cause was gone: the broker answered, the disk had space


class Pause(NamedTuple):
    start_s: float
    seconds: float
    cause: str  # empty: nothing explains it


def pauses(
    times_s: Sequence[float],
    incidents: Sequence[Incident],
    longer_s: float = PAUSE_S,
    return_s: float = RETURN_S,
) -> list[Pause]:
    """All gaps of more than `longer_s` between batches. `times_s`: when each came, ascending."""
    return [
        Pause(a, b - a, cause(a, b, incidents, return_s))
        for a, b in pairwise(times_s)
        if b - a > longer_s
    ]


def cause(start_s: float, end_s: float, incidents: Sequence[Incident], return_s: float) -> str:
    """What explains a gap: an incident in it, or just before it, that it does not outlast by more
    than `return_s`.
    """
    found = [
        one.what
        for one in incidents
        if start_s <= one.over_s + return_s and one.start_s <= end_s <= one.over_s + return_s
    ]
    return ", ".join(found)
