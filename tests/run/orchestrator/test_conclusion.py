"""What is said at the end of a run, with a report that is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring import report
from streamrl.run.monitoring.verdict import Verdict
from streamrl.run.orchestrator.conclusion import conclude
from streamrl.stream.log.memory import MemoryLog
from streamrl.system.errors import BrokerError


class Screen:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.chdir(tmp_path)
    return parse({"run": "r", "runs_dir": str(tmp_path / "runs"), "envs": {"e": {}}})


def test_the_reason_comes_first_and_then_where_the_report_lies(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(report, "write_report", lambda run, log: {"batches": 3})
    monkeypatch.setattr(report, "summary_line", lambda written: f"{written['batches']} batches")
    screen: Any = Screen()
    conclude(run, MemoryLog({}), screen, Verdict(0, "10 steps are done"))
    assert screen.closed
    assert capsys.readouterr().out.splitlines() == [
        "10 steps are done",
        "3 batches",
        "report: runs/r/report.json, curve: runs/r/reward.png",
    ]


def test_a_report_that_cannot_be_written_is_said(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(run: RunFile, log: object) -> None:
        raise BrokerError("the broker is away")

    monkeypatch.setattr(report, "write_report", refuse)
    screen: Any = Screen()
    conclude(run, MemoryLog({}), screen, Verdict(130, "interrupted"))
    assert capsys.readouterr().out.splitlines() == ["interrupted", "no report: the broker is away"]
