"""Which metrics can be genuine. Every part may write `metrics`, so a record is checked before its
values are shown.
"""

from __future__ import annotations

import math

import msgspec

from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Metric

WRITERS = {
    "batches": "batcher",
    "batcher": "batcher",
    "orchestrator": "orchestrator",
    "learner": "learner-",
    "env": "env-",
}
"""First piece of a metric's name -> the beginning of the name of the part that may measure it.

Any part may measure a metric whose first piece is not listed.
"""
# A metric whose step is further than this above the newest version is not genuine.
STEPS_AHEAD = 1_000
LARGEST = 1e30  # Sums of a view's values are finite.


def validate_metric(event: Event, version: int) -> Metric | None:
    """The metric of an event, or None if the record cannot be genuine.

    A genuine record has its source as its key, a finite time, and a step near the newest policy
    version. Values that are not finite, too large to be added up, or that the source may not
    measure are left out.
    """
    metric = event.record
    if not isinstance(metric, Metric) or event.key != metric.source:
        return None
    if not math.isfinite(metric.time_s):
        return None
    if metric.step is not None and not 0 <= metric.step <= version + STEPS_AHEAD:
        return None
    pieces = pieces_of_others(metric.source)
    refused = {
        name
        for name, value in metric.values.items()
        if not abs(value) <= LARGEST or f"{name}/".startswith(pieces)
    }
    if not refused:
        return metric
    values = {name: value for name, value in metric.values.items() if name not in refused}
    return msgspec.structs.replace(metric, values=values)


def pieces_of_others(source: str) -> tuple[str, ...]:
    """The first pieces, each with its slash, of the metrics that this source may not measure."""
    return tuple(f"{piece}/" for piece, writer in WRITERS.items() if not source.startswith(writer))
