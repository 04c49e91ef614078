from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the kernel has no such policy")
def test_a_process_that_moves_data_interrupts_nobody():
    settled = (
        "from streamrl.processor.tuning import tune_process; tune_process(); import os;"
        " print(os.sched_getscheduler(0))"
    )
    assert int(subprocess.check_output([sys.executable, "-c", settled])) == os.SCHED_BATCH
