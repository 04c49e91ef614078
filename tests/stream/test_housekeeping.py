from __future__ import annotations

import os
import subprocess
import sys

import pytest

from streamrl.inference import leash

linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the kernel has no such policy")
SAY = "import os; print(os.sched_getscheduler(0))"
SETTLED = "from streamrl.stream.housekeeping import settle_in; settle_in(); "


def said(code: str) -> int:
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout)


@linux
def test_a_process_that_moves_data_interrupts_nobody():
    assert said(SETTLED + SAY) == os.SCHED_BATCH


@linux
def test_the_server_that_an_agent_starts_is_scheduled_as_usual():
    held = [sys.executable, leash.__file__, "1", sys.executable, "-c", SAY]
    with_pipe = f"import subprocess; p = subprocess.Popen({held!r}, stdin=subprocess.PIPE); p.wait()"
    assert said(SETTLED + with_pipe) == os.SCHED_OTHER
