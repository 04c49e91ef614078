from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.monitoring.sinks import stories
from tests.run.monitoring.sinks.readers import mlflow_points


def test_a_resumed_run_continues_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Its store is one without a server and without a database.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "mlflow"
    stories.lives(tmp_path, "mlflow", tracking_uri=f"file://{store}")
    stories.assert_whole(mlflow_points(store))
