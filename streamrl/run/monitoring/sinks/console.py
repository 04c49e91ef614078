"""Prints a line for every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from streamrl.config import topology
from streamrl.run.monitoring.sinks.base import MetricRecord, SinkContext

SHOWN = (
    "batches/*/reward/mean",
    "learner/loss",
    "learner/grad_norm",
    "learner/step_s",
    "learner/idle_s",
    "batcher/batch_age_mean",
)
KEPT = 64  # steps kept until they are printed, as the learner is later than the batcher


class Console:
    """Prints a step when the lead learner has finished it, with the values known by then.

    Steps from before the run was last started are not printed again.
    """

    def __init__(self, context: SinkContext, show: Sequence[str] = SHOWN) -> None:
        """`show` has the names of metrics to print, in that order. * matches anything."""
        self._context = context
        self._show = tuple(show)
        self._lead = topology.learner_identity(context.run.learner.name)
        self._values: dict[int, dict[str, float]] = defaultdict(dict)
        self._said = -1

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            for row in record.rows:
                self._values[row.step] |= row.values
            step = record.metric.step
            if (
                record.metric.source == self._lead
                and step is not None
                and step > self._said
                and record.metric.time_s >= self._context.since_s
            ):
                self._said = step
                self._context.say(f"step {step}: {self._line(self._values[step])}")
            for old in sorted(self._values)[:-KEPT]:
                del self._values[old]

    def close(self) -> None: ...

    def _line(self, values: dict[str, float]) -> str:
        names = [name for pattern in self._show for name in values if fnmatchcase(name, pattern)]
        if not names:
            return "nothing of what is to be shown"
        return ", ".join(f"{name} {values[name]:.4g}" for name in dict.fromkeys(names))
