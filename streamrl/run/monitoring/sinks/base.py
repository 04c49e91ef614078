"""A sink takes the metrics of a run to another place. Each sink has a file, with the name that the
sink has in the run file.

The topic `metrics` is the truth. A sink is given every record of it at least once, in the order of
the topic, over all starts of the run. After a crash it is given the records of the last minute or
two again (`runner.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from streamrl.config.run_file import RunFile
from streamrl.stream.records import Metric


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
    say: Callable[[str], None]  # shows a line to the user who watches the run
    since_s: float  # when the run was last started; older records are history


SinkFactory = Callable[..., Sink]  # (context, **params)
