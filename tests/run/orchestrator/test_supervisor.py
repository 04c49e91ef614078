import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.run.orchestrator import plan
from streamrl.run.orchestrator.plan import PartState
from streamrl.run.orchestrator.supervisor import Supervisor, last_line
from tests.support.processes import MARK, left_after, marked
from tests.support.waiting import until

PYTHON = [sys.executable, "-c"]
SLEEP = [*PYTHON, "import time; print('up', flush=True); time.sleep(600)"]
DEAF = [
    *PYTHON,
    (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up',"
        " flush=True); time.sleep(600)"
    ),
]
PARENT = [
    *PYTHON,
    (
        f"import subprocess, sys, time; subprocess.Popen({SLEEP!r}); print('up', flush=True);"
        " time.sleep(600)"
    ),
]


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def supervisor(tmp_path: Path, mark: str) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", {**os.environ, MARK: mark})
    yield made
    made.close(limit_s=1.0)


def observed(supervisor: Supervisor) -> dict[str, PartState]:
    supervisor.notice_exits()
    return supervisor.observe()


def test_a_part_runs_and_its_log_is_appended_to(supervisor: Supervisor):
    for _ in range(2):
        supervisor.start("a", [*PYTHON, "import sys; print('out'); sys.exit('err')"])
        until(lambda: not observed(supervisor)["a"].running)
    assert supervisor.log_path("a").read_text() == "out\nerr\nout\nerr\n"
    assert [end.exit_code for end in observed(supervisor)["a"].ends] == [1, 1]
    assert supervisor.last_line("a") == "err"


def test_a_part_has_variables_of_its_own(supervisor: Supervisor):
    says = [*PYTHON, "import os; print(os.environ.get('OWN'), len(os.environ) > 3)"]
    supervisor.start("a", says, {"OWN": "4,5"})
    supervisor.start("b", says)
    until(lambda: not any(part.running for part in observed(supervisor).values()))
    assert supervisor.log_path("a").read_text() == "4,5 True\n"
    assert supervisor.log_path("b").read_text() == "None True\n"


def test_an_end_is_noticed_once_and_by_its_signal(supervisor: Supervisor):
    supervisor.start("a", SLEEP)
    assert observed(supervisor)["a"].running
    os.kill(supervisor.pid("a"), signal.SIGKILL)
    until(lambda: not observed(supervisor)["a"].running)
    assert [end.exit_code for end in observed(supervisor)["a"].ends] == [-9]


def test_what_a_part_last_held_is_known_when_somebody_else_kills_it(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
):
    block = "x = b'x' * (64 << 20); print('up', flush=True); import time; time.sleep(600)"
    supervisor.start("a", [*PYTHON, block])
    until(lambda: supervisor.last_line("a") == "up")
    observed(supervisor)
    os.kill(supervisor.pid("a"), signal.SIGKILL)
    until(lambda: not observed(supervisor)["a"].running)
    [end] = observed(supervisor)["a"].ends
    assert end.held_bytes > 64 << 20 and not end.killed
    assert "for lack of memory, or by hand; it last held 0.1 GiB" in caplog.text


def test_a_kill_of_its_own_is_no_lack_of_memory(supervisor: Supervisor):
    supervisor.start("a", SLEEP)
    supervisor.kill("a", "it hangs")
    until(lambda: not observed(supervisor)["a"].running)
    [end] = observed(supervisor)["a"].ends
    assert end.killed


def test_lives_are_timed_by_a_clock_that_nobody_sets(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
):
    clock = itertools.count(1e9, -3_600.0)  # set back an hour whenever it is looked at
    monkeypatch.setattr(time, "time", lambda: next(clock))
    supervisor.start("a", [*PYTHON, "pass"])
    until(lambda: not observed(supervisor)["a"].running)
    [end] = observed(supervisor)["a"].ends
    assert end.lived_s >= 0 and abs(time.monotonic() - end.time_s) < 3_600


def test_what_a_part_has_started_ends_with_it(supervisor: Supervisor, mark: str):
    supervisor.start("a", PARENT)
    until(lambda: len(marked(mark)) == 2)
    os.kill(supervisor.pid("a"), signal.SIGKILL)
    until(lambda: not observed(supervisor)["a"].running)
    assert left_after(mark) == []


def test_stop_ends_those_that_listen_and_those_that_do_not(supervisor: Supervisor, mark: str):
    for name, command in (("env-a-0", SLEEP), ("learner", DEAF), ("buffer", PARENT)):
        supervisor.start(name, command)
    until(
        lambda: all(supervisor.last_line(name) == "up" for name in ("env-a-0", "learner", "buffer"))
    )
    supervisor.stop_all(exclude=("env-a-0",), limit_s=0.5)
    until(lambda: [process.pid for process in marked(mark)] == [supervisor.pid("env-a-0")])
    supervisor.stop_all(limit_s=0.5)
    assert left_after(mark) == [] and observed(supervisor) == {}


def test_what_has_left_its_part_behind_is_found_too(supervisor: Supervisor, mark: str):
    runaway = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    supervisor.start("a", [*PYTHON, runaway])
    until(lambda: not observed(supervisor)["a"].running)
    until(lambda: len(marked(mark)) == 1)
    supervisor.close()
    assert left_after(mark) == []


def test_no_part_outlives_a_supervisor_that_is_killed(tmp_path: Path, mark: str):
    script = f"""
import sys, time
from pathlib import Path
from streamrl.run.orchestrator.plan import PartState
from streamrl.run.orchestrator.supervisor import Supervisor
supervisor = Supervisor(Path({str(tmp_path)!r}))
supervisor.start("deaf", {DEAF!r})
supervisor.start("parent", {PARENT!r})
time.sleep(600)
"""
    owner = subprocess.Popen([*PYTHON, script], env={**os.environ, MARK: mark})
    until(lambda: all(last_line(tmp_path / f"{name}.log") == "up" for name in ("deaf", "parent")))
    until(lambda: len(marked(mark)) == 5)  # with the child of one, and the orphan reaper
    owner.kill()
    owner.wait()
    assert left_after(mark) == []


def test_last_line_of_a_log(tmp_path: Path):
    (tmp_path / "a.log").write_text("one\n" * 9_000 + "two\n  \n\n")
    assert last_line(tmp_path / "a.log") == "two"
    assert last_line(tmp_path / "missing.log") == ""


def test_an_end_notes_whether_the_part_had_done_work_and_the_broker_answered(
    supervisor: Supervisor,
):
    ends = [*PYTHON, "raise SystemExit(3)"]
    for name in ("a", "b"):
        supervisor.start(name, ends)

    def both_ended() -> bool:
        supervisor.notice_exits(progressed=["a"], broker_answers=True)
        return not any(part.running for part in supervisor.observe().values())

    until(both_ended)
    noted = [
        (end.progressed, end.broker_answered)
        for part in supervisor.observe().values()
        for end in part.ends
    ]
    assert noted == [(True, True), (False, True)]


def test_a_learner_is_waited_for_and_another_part_that_is_as_slow_is_killed(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both take their time after SIGTERM. The limit of other parts is over at once."""
    monkeypatch.setattr(plan, "STOP_LIMIT_S", 0.0)
    slow = (
        "import pathlib, signal, sys, time;"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1),"
        " pathlib.Path(sys.argv[1]).touch(), sys.exit()));"
        "print('up', flush=True); time.sleep(600)"
    )
    for name in ("learner", "buffer"):
        supervisor.start(name, [*PYTHON, slow, str(tmp_path / name)])
        until(lambda name=name: supervisor.last_line(name) == "up")
    supervisor.stop(["learner", "buffer"])
    assert (tmp_path / "learner").exists() and not (tmp_path / "buffer").exists()
