"""Whether a run is asked to end or killed, nothing of it stays behind. No server is needed for
that: the parts are the real ones, and the broker. tests/orchestrator/test_process.py ends runs of
actors in every other way.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.loop.runs import command_line, live, quickstart

WITHOUT_SERVERS = {**quickstart(), "inference": {"max_model_len": 64, "replicas": 0}}


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_stays_behind(tmp_path: Path, sign: signal.Signals, code: int):
    with live(tmp_path, WITHOUT_SERVERS) as run:
        run.up()
        run.until(
            lambda: len([p for p in run.processes() if "streamrl.cli" in command_line(p)]) >= 6,
            "its parts",
            90,
        )
        assert run.process is not None
        os.kill(run.process.pid, sign)
        assert run.wait(60) == code, run.said()
        run.nothing_left()
