"""What a program in the sandbox can do, and what it cannot: each by trying."""

from __future__ import annotations

import asyncio
import os
import platform
from pathlib import Path

import psutil
import pytest

from streamrl.envs import limits, sandbox
from streamrl.envs.sandbox import Outcome
from tests.waiting import until


def run(program: str, *tests: str, timeout_s: float = 10.0, memory_mib: int = 256) -> Outcome:
    return asyncio.run(sandbox.run(program, tests, timeout_s, memory_mib))


def test_tests_see_the_names_of_the_program_and_each_passes_by_itself():
    outcome = run("import math\ndef f(x): return math.floor(x) + 1\nprint('hello')", "assert f(1) == 2", "assert f(1) == 3", "assert math.pi > f(2)")
    assert outcome == Outcome("ok", [True, False, True], "hello")


@pytest.mark.parametrize(("program", "says"), [("def f(:", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ("import sys; sys.exit(3)", "")])
def test_a_program_that_fails_passes_nothing(program: str, says: str):
    outcome = run(program, "pass")
    assert outcome.end == "error" and outcome.passed == [False] and says in outcome.output


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(3600)"])
def test_time_is_limited_at_work_and_asleep(program: str):
    assert run(program, "pass", timeout_s=1.0).end == "time"


def test_memory_is_limited():
    outcome = run("x = bytearray(10 ** 10)", "pass")
    assert outcome.end == "memory" and outcome.passed == [False]


def test_output_is_limited():
    assert run("while True: print('x' * 1000)").end == "output"


def test_a_result_cannot_be_printed():
    cheat = "for i in range(2): print('passed', i); print('0' * 32, 'passed', i)\nimport os; os._exit(0)"
    outcome = run(cheat, "assert False", "assert False")
    assert outcome.passed == [False, False]


DENIED = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "listen": "import socket; socket.socket().bind(('127.0.0.1', 0))",
    "datagram": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "program": "import subprocess; subprocess.run(['/bin/true'])",
    "fork": "import os; os.fork()",
    "thread": "import threading; threading.Thread(target=print).start()",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "signal": "import os; os.kill({pid}, 0)",
    "write": "open('{path}', 'w')",
    "truncate": "import os; os.truncate('{path}', 0)",
    "append": "open('{path}', 'a')",
    "remove": "import os; os.remove('{path}')",
    "rename": "import os; os.rename('{path}', '{path}2')",
    "directory": "import os; os.mkdir('{path}3')",
    "io_uring": "import ctypes, os; n = ctypes.CDLL(None, use_errno=True).syscall(425, 1, 0)\nif n < 0: raise OSError(ctypes.get_errno(), 'denied')",
}


@pytest.mark.parametrize("what", DENIED)
def test_no_network_no_other_programs_nobody_signalled_nothing_written(what: str, tmp_path: Path):
    file = tmp_path / "precious"
    file.write_text("kept")
    outcome = run(DENIED[what].format(port=9, pid=os.getpid(), path=file))
    assert outcome.end == "error" and any(word in outcome.output for word in ("PermissionError", "can't start new thread")), outcome.output
    assert [path.name for path in tmp_path.iterdir()] == ["precious"] and file.read_text() == "kept"


@pytest.mark.parametrize("how", ["print(open('{path}').read())", "import os; print(os.listdir('{directory}'))", "open('/proc/self/environ').read()"])
def test_nothing_is_read_but_its_own_and_pythons(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "secret"
    file.write_text("hunter2")
    sandbox._say_that_it_reads.cache_clear()
    outcome = run(how.format(path=file, directory=tmp_path))
    denied = outcome.end == "error" and "PermissionError" in outcome.output and "hunter2" not in outcome.output
    assert denied or "no Landlock" in caplog.text, outcome  # what a kernel without it does is the next test but one


def test_it_reads_its_own_file_and_loads_modules():
    program = "import ctypes, decimal, json, sqlite3, ssl, unittest, xml.sax, zlib, zoneinfo\nprint(len(open(__file__).read()))"
    assert run(program, "assert decimal.Decimal(1)", "assert json.loads('1') == 1") == Outcome("ok", [True, True], str(len(program)))


def test_without_landlock_it_runs_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    elsewhere = tmp_path / "limits.py"
    elsewhere.write_text(Path(limits.__file__).read_text().replace("= 444, 445, 446", "= 100_444, 445, 446"))
    monkeypatch.setattr(limits, "__file__", str(elsewhere))
    sandbox._say_that_it_reads.cache_clear()
    for _ in range(2):
        assert run("print('hello')", "pass") == Outcome("ok", [True], "hello")
    assert [record.message.count("no Landlock") for record in caplog.records] == [1]


def test_the_calls_of_another_machine_end_it():
    """A call of the 32-bit numbering under this kernel would go past a list of numbers."""
    if platform.machine() == "x86_64":
        outcome = run("import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0)\nprint('still here')")
        assert outcome.end != "ok" and "still here" not in outcome.output


def test_where_there_is_no_sandbox_nothing_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kernel that takes no filter is not a program that fails: its tests would all have been failed by the policy."""
    elsewhere = tmp_path / "limits.py"
    elsewhere.write_text(Path(limits.__file__).read_text().replace('"x86_64": (', '"other": (').replace('"aarch64": (', '"another": ('))
    monkeypatch.setattr(limits, "__file__", str(elsewhere))
    with pytest.raises(OSError, match=f"there is no sandbox on this machine: .*no list of system calls for {platform.machine()}"):
        run("print('hello')")


def test_the_filter_by_hand():
    code = limits.program(7, (41,), None, 56)
    lines = [code[i : i + 8].hex() for i in range(0, len(code), 8)]
    assert lines[:3] == ["2000000004000000", "1500010007000000", "0600000000000080"]  # load the machine; is it 7? otherwise kill
    assert lines[6:8] == ["1500000129000000", "060000000d000500"]  # is it call 41? then EACCES
    assert lines[-1] == "060000000000ff7f" and len(lines) == 6 + 2 * (1 + len(limits.EVERYWHERE)) + 5 + 1


def test_nothing_of_it_is_left():
    async def cancelled() -> None:
        running = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
        await asyncio.to_thread(until, children)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def children() -> list[psutil.Process]:
        return [p for p in psutil.Process().children() if any("limits.py" in word for word in p.cmdline())]

    asyncio.run(cancelled())
    assert children() == []
