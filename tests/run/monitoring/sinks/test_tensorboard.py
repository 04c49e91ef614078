from __future__ import annotations

from pathlib import Path

from tests.run.monitoring.sinks import stories
from tests.run.monitoring.sinks.readers import tensorboard_points


def test_a_resumed_run_continues_its_curves(tmp_path: Path):
    stories.lives(tmp_path, "tensorboard")
    stories.assert_whole(tensorboard_points(tmp_path / "digits" / "tensorboard"))
