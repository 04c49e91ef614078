"""Records of metrics to points of curves: every value belongs to a step. Pure.

What carries a step lies there. What does not (how many requests are in flight, how long a turn
takes) is measured all the time; its last value before the lead learner finished a step is taken
with that step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.monitoring.metric_names import curve
from streamrl.monitoring.sinks.base import Entry, Row
from streamrl.records import Metric


@dataclass
class Curves:
    """A fold over the topic: the same records make the same points, wherever it begins to matter."""

    lead: str  # source of the lead learner's metrics
    gauges: dict[str, float] = field(default_factory=dict[str, float])

    def entry(self, offset: int, metric: Metric) -> Entry:
        values = {
            curve(metric.source, name, self.lead): value for name, value in metric.values.items()
        }
        if metric.step is None:
            self.gauges |= values
            return Entry(offset, metric, ())
        rows = [Row(metric.step, metric.time_s, values)]
        if metric.source == self.lead and self.gauges:
            rows.append(Row(metric.step, metric.time_s, dict(self.gauges)))
        return Entry(offset, metric, rows)
