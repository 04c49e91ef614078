"""The metrics of a part for Prometheus: those of the topic `metrics`, with the names of
`metric_names.py` and with run and part as labels.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from streamrl.config.metric_spec import MetricSpec, prometheus_name
from streamrl.run.monitoring.metric_names import find_metric
from streamrl.stream.log.instrumented import InstrumentedLog


class MetricsCollector:
    """Collects the newest value of every metric for prometheus_client."""

    def __init__(self, run: str, log: InstrumentedLog) -> None:
        self._run = run
        self._log = log

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for (source, name), value in self._values().items():
            spec, label_values = find_metric(name) or (None, ())
            family_name = spec.prometheus if spec else prometheus_name(name)
            if family_name not in families:
                families[family_name] = self._new_family(family_name, name, spec)
            families[family_name].add_metric([self._run, source, *label_values], value)
        return iter(families.values())

    def _new_family(
        self, family_name: str, name: str, spec: MetricSpec | None
    ) -> GaugeMetricFamily | CounterMetricFamily:
        """A family without values. A metric without a spec is a gauge without labels."""
        if spec is None:
            return GaugeMetricFamily(family_name, name, labels=("run", "part"))
        kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        text = f"{spec.name} ({spec.unit}): {spec.meaning}"
        return kind(family_name, text, labels=("run", "part", *spec.labels))

    def _values(self) -> dict[tuple[str, str], float]:
        """The newest value of each (source, name)."""
        log = self._log
        values = dict(log.steps)
        for source, report in (*log.reports.items(), (log.part, log.metrics())):
            values |= {(source, name): value for name, value in report.items()}
        return values
