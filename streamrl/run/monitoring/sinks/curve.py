"""Makes points of curves from records of metrics, so that every value belongs to a step. Pure.

A record with a step gives points at that step. A record without one is measured all the time, as
the number of requests in flight is; its last value before the lead learner finished a step becomes
a point at that step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.run.monitoring.metric_names import series_name
from streamrl.run.monitoring.sinks.base import MetricRecord, MetricRow
from streamrl.stream.records import Metric


@dataclass
class Curves:
    """A fold over the topic `metrics`, from any record on. What parts measure all the time is in
    the points of a step if it has come since then.
    """

    lead: str  # source of the lead learner's metrics
    gauges: dict[str, float] = field(default_factory=dict[str, float])

    def entry(self, offset: int, metric: Metric) -> MetricRecord:
        """Fold the next record, and return it with its points."""
        values = {
            series_name(metric.source, name, self.lead): value
            for name, value in metric.values.items()
        }
        if metric.step is None:
            self.gauges |= values
            return MetricRecord(offset, metric, ())
        rows = [MetricRow(metric.step, metric.time_s, values)]
        if metric.source == self.lead and self.gauges:
            rows.append(MetricRow(metric.step, metric.time_s, dict(self.gauges)))
        return MetricRecord(offset, metric, rows)
