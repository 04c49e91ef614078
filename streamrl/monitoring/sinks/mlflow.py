"""MLflow: one MLflow run for the whole run, over all its sessions. Which server, and who may write
to it, is MLflow's own business: its variables MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN and so on.

MLflow takes no @ in a name: `pass@4` is `pass:4` there.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from streamrl.monitoring.sinks.base import MetricRecord, SinkContext

AT_ONCE = 1_000  # the metrics that an MLflow server takes in one request
TAG = "streamrl.run"  # the tag by which a resumed run is found again


class MLflow:
    """Goes on with the MLflow run of the earlier sessions."""

    def __init__(
        self, context: SinkContext, experiment: str = "streamrl", tracking_uri: str = ""
    ) -> None:
        self._client = MlflowClient(tracking_uri or None)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        name = context.run.run
        runs = self._client.search_runs([number], f"tags.`{TAG}` = '{name}'", max_results=1)
        self._run: str = (
            runs[0].info.run_id
            if runs
            else self._client.create_run(number, run_name=name, tags={TAG: name}).info.run_id
        )
        if runs:
            self._client.update_run(self._run, status="RUNNING")

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
    return name.replace("@", ":")
