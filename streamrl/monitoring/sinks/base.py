"""What a sink is: a place that the orchestrator takes the run's metrics to. One file a sink, by the
name it has in the run file.

The topic `metrics` is the truth, and the orchestrator reads it from its start every time. So a sink
is given the same entries again in its next life, and takes those that it does not have: what it has
it reads from what it has written, not from a note beside it that a crash could make wrong. That is
all that a resumed run needs to continue its curves, with no step left out and none twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from streamrl.config.run_file import RunFile
from streamrl.records import Metric


class Row(NamedTuple):
    """Values that belong to a step: a batch number or policy version. By the names of
    `metric_names.curve`.
    """

    step: int
    time_s: float
    values: Mapping[str, float]


class Entry(NamedTuple):
    """One record of the topic, and what it adds to the curves."""

    offset: int
    metric: Metric
    rows: Sequence[Row]


class Sink(Protocol):
    """Called from one thread. What it raises is the end of this sink, and of nothing else."""

    def take(self, entries: Sequence[Entry]) -> None: ...

    def close(self) -> None: ...


class Place(NamedTuple):
    """What a sink is made for."""

    run: RunFile
    say: Callable[[str], None]  # a line for whoever watches the run
    since_s: float  # this session began; what is older is history


Make = Callable[..., Sink]  # (place, **params)


@dataclass
class Steps:
    """A set of steps, small where they are next to each other: [first, behind the last] of each
    stretch, ascending.
    """

    stretches: list[list[int]] = field(default_factory=list[list[int]])

    def add(self, step: int) -> bool:
        """True when it was not in there."""
        at = bisect_right(self.stretches, step, key=lambda stretch: stretch[0])
        before = self.stretches[at - 1] if at else None
        if before and step < before[1]:
            return False
        after = (
            self.stretches[at]
            if at < len(self.stretches) and self.stretches[at][0] == step + 1
            else None
        )
        if before and before[1] == step:
            before[1] = after[1] if after else step + 1
            if after:
                del self.stretches[at]
        elif after:
            after[0] = step
        else:
            self.stretches.insert(at, [step, step + 1])
        return True


@dataclass
class Had:
    """The points that a sink has: of each curve its steps."""

    curves: dict[str, Steps] = field(default_factory=lambda: defaultdict[str, Steps](Steps))

    def add(self, name: str, step: int) -> bool:
        """True when the point is new."""
        return self.curves[name].add(step)

    def new(self, entries: Sequence[Entry]) -> list[Row]:
        """What these entries add: points that are there already are left out, and so are rows of
        nothing else. The first value of a point counts: a learner that trains on a batch again
        after a crash measures the same, but for its times.
        """
        rows = [
            row._replace(
                values={name: v for name, v in row.values.items() if self.add(name, row.step)}
            )
            for e in entries
            for row in e.rows
        ]
        return [row for row in rows if row.values]
