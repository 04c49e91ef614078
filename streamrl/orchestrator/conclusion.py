"""The end of a run: how it ended, and its report."""

from __future__ import annotations

from streamrl.config.run_file import RunFile
from streamrl.errors import StreamrlError
from streamrl.log.protocol import Log
from streamrl.monitoring import report
from streamrl.monitoring.display import Display
from streamrl.monitoring.verdict import Verdict
from streamrl.orchestrator.terminal import say, short_path


def conclude(run: RunFile, log: Log, display: Display, verdict: Verdict) -> None:
    """Say how the run ended, and write its report. An interrupted run has one too."""
    display.close()
    say(verdict.reason)
    try:
        written = report.write_report(run, log)
    except StreamrlError as error:  # the verdict is what counts
        say(f"no report: {error}")
        return
    say(report.summary_line(written))
    path = short_path(run.directory / "report.json")
    curve = short_path(run.directory / "reward.png")
    say(f"report: {path}, curve: {curve}")
