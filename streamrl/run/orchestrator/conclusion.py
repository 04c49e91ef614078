"""The end of a run: how it ended, and its report."""

from __future__ import annotations

from streamrl.config.run_file import RunFile
from streamrl.run.monitoring import report
from streamrl.run.monitoring.display import Display
from streamrl.run.monitoring.verdict import Verdict
from streamrl.run.orchestrator.terminal import say, short_path
from streamrl.stream.log.protocol import Log
from streamrl.system.errors import StreamrlError


def conclude(run: RunFile, log: Log, display: Display, verdict: Verdict) -> None:
    """Report how the run ended, and write its report. An interrupted run has one too."""
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
