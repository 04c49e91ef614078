"""The files in which Prometheus finds the parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.run_file import RunFile
from streamrl.run.monitoring import http
from streamrl.run.monitoring.http import ListenOverride, serving
from streamrl.run.monitoring.targets import remove_targets
from streamrl.stream.log.instrumented import InstrumentedLog
from streamrl.stream.log.memory import MemoryLog
from tests.run.monitoring.endpoints import TOPICS, metrics_urls
from tests.support.waiting import until


def test_what_killed_parts_have_noted_is_forgotten_and_noted_again_by_those_that_live(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "LOOK_S", 0.05)
    with serving(run, MemoryLog(TOPICS), "buffer"):
        [mine] = metrics_urls(run, "buffer")
        others = [
            run.directory.parent / ".targets" / name
            for name in ("small.gone.json", "smaller.buffer.json")
        ]
        for file in others:
            file.write_text("[]")
        remove_targets(run, ["gone"])
        assert [file.exists() for file in others] == [False, True]
        assert metrics_urls(run, "buffer") == [mine]


def test_a_directory_that_cannot_be_written_is_no_reason_not_to_work(run: RunFile, tmp_path: Path):
    (tmp_path / "file").write_text("")
    nowhere = run.model_copy(update={"runs_dir": str(tmp_path / "file")})
    with serving(nowhere, MemoryLog(TOPICS), "buffer", ListenOverride(None, 0)) as log:
        assert isinstance(log, InstrumentedLog)
        log.reader({("in", 0): 0})
        log.mark_ready()
        until(lambda: log.readiness_problems() == [])  # the thread that notes it lives
