from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.extensions.recordings.open_recording import is_export, open_recording


def test_a_directory_is_an_export_unless_a_run_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    assert is_export("small") and not is_export("other")
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "run.yaml").touch()
    assert not is_export("small")


def test_an_export_is_opened_without_a_broker():
    with open_recording("tests/golden/run") as (settings, log):
        assert settings.run and log.topics()
