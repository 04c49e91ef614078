from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.run.monitoring.sinks.wandb import wait_for_a_name
from tests.run.monitoring.sinks import stories
from tests.run.monitoring.sinks.readers import wandb_points


def test_a_resumed_run_continues_its_curves(tmp_path: Path):
    stories.lives(tmp_path, "wandb", mode="offline")
    stories.assert_whole(wandb_points(tmp_path / "digits" / "wandb"))


def test_two_sessions_of_one_second_have_two_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seconds = iter(("20260101_000000", "20260101_000000", "20260101_000001"))
    monkeypatch.setattr("time.strftime", lambda _: next(seconds))
    (tmp_path / "offline-run-20260101_000000-digits").mkdir()
    wait_for_a_name(tmp_path)
    assert list(seconds) == []
