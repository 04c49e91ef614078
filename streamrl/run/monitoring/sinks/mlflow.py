"""Writes metrics to MLflow. All starts of a run belong to one MLflow run.

The server and the credentials come from MLflow's environment variables, as MLFLOW_TRACKING_URI and
MLFLOW_TRACKING_TOKEN. MLflow does not accept @ in a name, so `pass@4` is written as `pass:4`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from streamrl.run.monitoring.sinks.base import MetricRecord, SinkContext

AT_ONCE = 1_000  # the metrics that an MLflow server takes in one request
TAG = "streamrl.run"  # the tag by which a resumed run is found again


class MLflow:
    """Continues the MLflow run of the earlier starts."""

    def __init__(
        self, context: SinkContext, experiment: str = "streamrl", tracking_uri: str = ""
    ) -> None:
        self._client = MlflowClient(tracking_uri or None)
        existing = self._client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing else self._client.create_experiment(experiment)
        name = context.run.run
        runs = self._client.search_runs([number], f"tags.`{TAG}` = '{name}'", max_results=1)
        if runs:
            self._run: str = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            created = self._client.create_run(number, run_name=name, tags={TAG: name})
            self._run = created.info.run_id

    def write(self, records: Sequence[MetricRecord]) -> None:
        metrics = [
            Metric(name_of(name), value, int(row.time_s * 1000), row.step)
            for record in records
            for row in record.rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run, metrics[start : start + AT_ONCE])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def name_of(name: str) -> str:
    """The name of a metric in MLflow."""
    return name.replace("@", ":")
