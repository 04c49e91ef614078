"""A sink takes the metrics of a run to another place. Each sink has a file, with the name that the
sink has in the run file.

The topic `metrics` is the truth, and the orchestrator reads it from its start every time. So a sink
is given the same records again when a run is resumed, and writes those that it does not have. It
finds out what it has from what it has written, and not from a note beside it that a crash could
make wrong. So a resumed run continues its curves, with no step missing and none twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from streamrl.config.run_file import RunFile
from streamrl.records import Metric


class MetricRow(NamedTuple):
    """The values of one step, which is a batch number or a policy version.

    They are named as `metric_names.series_name` names curves.
    """

    step: int
    time_s: float
    values: Mapping[str, float]


class MetricRecord(NamedTuple):
    """One record of the topic `metrics` and the points that it adds to the curves."""

    offset: int
    metric: Metric
    rows: Sequence[MetricRow]


class Sink(Protocol):
    """A sink is called from one thread. An exception ends this sink and nothing else."""

    def write(self, records: Sequence[MetricRecord]) -> None: ...

    def close(self) -> None: ...


class SinkContext(NamedTuple):
    """What a sink is given when it is made."""

    run: RunFile
    say: Callable[[str], None]  # shows a line to whoever watches the run
    since_s: float  # when this session of the run began; older records are history


SinkFactory = Callable[..., Sink]  # (context, **params)


@dataclass
class StepSet:
    """A set of steps, kept as ascending ranges [first, end), so that a whole run needs few."""

    stretches: list[list[int]] = field(default_factory=list[list[int]])

    def add(self, step: int) -> bool:
        """Returns whether the step is new."""
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
class WrittenPoints:
    """The points that a sink has written: the steps of each curve."""

    curves: dict[str, StepSet] = field(default_factory=lambda: defaultdict[str, StepSet](StepSet))

    def add(self, name: str, step: int) -> bool:
        """Returns whether the point is new."""
        return self.curves[name].add(step)

    def new(self, records: Sequence[MetricRecord]) -> list[MetricRow]:
        """The points of these records that have not been written, as rows without empty ones.

        The first value of a point counts. A learner that trains on a batch again after a crash
        measures the same values, except for its times.
        """
        rows: list[MetricRow] = []
        for record in records:
            for row in record.rows:
                values: dict[str, float] = {}
                for name, value in row.values.items():
                    if self.add(name, row.step):
                        values[name] = value
                if values:
                    rows.append(row._replace(values=values))
        return rows
