"""Nothing of a command outlives its owner. The other two forms are tested with the supervisor
(tests/run/orchestrator/test_supervisor.py) and the broker
(tests/stream/local_kafka/test_broker.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from streamrl.system.process_group import guarded
from tests.support.waiting import patience, until

# A command that takes no notice of SIGTERM and has a child that does not either, as a stand-in for
# vLLM's API server and its engine.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{__file__}.{sys.argv[1:]}", "w").close()
if sys.argv[1:]:
    subprocess.Popen([sys.executable, __file__])
time.sleep(60)
"""
OWNER = (
    "import subprocess, sys, time; held = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE);"
    " time.sleep(60)"
)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_an_owner_that_is_killed(tmp_path: Path, end: signal.Signals):
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            OWNER,
            *guarded([sys.executable, str(script), "parent"], grace_s=0.2),
        ]
    )
    # guard, command, its child
    until(lambda: len(psutil.Process(owner.pid).children(recursive=True)) == 3)
    family = psutil.Process(owner.pid).children(recursive=True)
    until(lambda: len(list(tmp_path.glob("stubborn.py.*"))) == 2)
    os.kill(owner.pid, end)
    owner.wait()
    until(lambda: not any(alive(process) for process in family))


def test_a_command_that_ends_takes_what_it_left_behind_with_it(tmp_path: Path):
    script = tmp_path / "leaves.py"
    script.write_text(
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True);"
        " sys.exit(3)"
    )
    command = guarded([sys.executable, str(script)], grace_s=1.0)
    held = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    orphan = int(held.stdout.readline())
    assert held.wait(patience(10)) == 3
    assert not psutil.pid_exists(orphan) or not alive(psutil.Process(orphan))


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the kernel has no such policy")
def test_a_command_is_scheduled_as_usual_whatever_its_owner_is():
    show = "import os; print(os.sched_getscheduler(0))"
    command = guarded([sys.executable, "-c", show], grace_s=1.0)
    settle = (
        "from streamrl.system.tuning import tune_process; tune_process(); import subprocess, sys; "
    )
    held = "subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait()"
    assert (
        int(subprocess.check_output([sys.executable, "-c", settle + held, *command]))
        == os.SCHED_OTHER
    )


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
