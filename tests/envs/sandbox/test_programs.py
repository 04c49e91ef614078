"""What a program in the sandbox can do, and what it cannot: each by trying."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from streamrl.envs.sandbox import programs
from streamrl.envs.sandbox.limits import SandboxLimits
from streamrl.envs.sandbox.programs import ProgramResult
from tests.support.waiting import patience, until


def run(program: str, *tests: str, timeout_s: float = 30.0, memory_mib: int = 256) -> ProgramResult:
    return asyncio.run(programs.run(program, tests, SandboxLimits(patience(timeout_s), memory_mib)))


def test_tests_see_the_names_of_the_program_and_each_passes_by_itself():
    outcome = run(
        "import math\ndef f(x): return math.floor(x) + 1\nprint('hello')",
        "assert f(1) == 2",
        "assert f(1) == 3",
        "assert math.pi > f(2)",
    )
    assert outcome == ProgramResult("ok", [True, False, True], "hello")


@pytest.mark.parametrize(
    ("program", "says"),
    [("def f(:", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ("import sys; sys.exit(3)", "")],
)
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
    cheat = (
        "for i in range(2): print('passed', i); print('0' * 32, 'passed', i)\nimport os;"
        " os._exit(0)"
    )
    outcome = run(cheat, "assert False", "assert False")
    assert outcome.passed == [False, False]


def test_it_loads_modules_of_python():
    program = (
        "import ctypes, decimal, json, sqlite3, ssl, unittest, xml.sax, zlib, zoneinfo\ndef f():"
        " return str(zoneinfo.ZoneInfo('UTC'))"
    )
    assert run(program, "assert f() == 'UTC'") == ProgramResult("ok", [True], "")


PLAIN = [1, True, 2.5, None, "a", b"a", (1, [2]), {3}, frozenset("b"), {(1, 2): {"c": [None]}}, 1j]


def test_plain_data_comes_as_it_is():
    """Every type that goes in and out keeps its type: a list is no tuple."""
    outcome = run(
        "def f(x): return x", f"for x in {PLAIN!r}: assert f(x) == x and type(f(x)) is type(x)"
    )
    assert outcome.passed == [True], outcome
    program = "def f(x): return [x]\ndef g(x, *, y=0): return (x, y)\nN = {'a': (1,)}"
    tests = [
        "assert f(1) == (1,)",
        "assert g(1, y=2) == (1, 2)",
        "assert N == {'a': (1,)}",
        "def check(h):\n    assert h(2) == [2]\ncheck(f)",
    ]
    assert run(program, *tests).passed == [False, True, True, True]


def test_a_test_sees_what_a_function_raises_and_nothing_that_is_not_plain():
    program = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return object()"
    expects = (
        "try: f(-1)\nexcept ValueError as error: assert str(error) == 'negative'\nelse: assert"
        " False"
    )
    outcome = run(program, expects, "f(1)", "g(1)", "assert False")
    assert (
        outcome.passed == [True, False, False, False]
        and "object is not plain data" in outcome.output
    )


def test_what_is_said_of_an_error_names_the_line():
    outcome = run("def f(x):\n    return 1 // x", "f(0)")
    assert (
        'File "program.py", line 2, in f' in outcome.output
        and "return 1 // x" in outcome.output
        and "cell.py" not in outcome.output
    )


def test_a_program_that_ends_while_it_is_asked_fails_the_tests_that_follow():
    outcome = run(
        "import os\ndef f(x):\n    if x: os._exit(0)\n    return 0",
        "assert f(0) == 0",
        "f(1)",
        "assert f(0) == 0",
    )
    assert outcome.passed == [True, False, False]


def test_an_answer_without_end_is_none():
    assert run("def f(): return 'x' * 3_000_000", "assert len(f()) == 3_000_000").passed == [False]


def test_nothing_of_it_is_left():
    async def cancelled() -> None:
        running = asyncio.create_task(
            programs.run("import time; time.sleep(3600)", limits=SandboxLimits(3600.0))
        )
        await asyncio.to_thread(until, children)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def children() -> list[psutil.Process]:
        return [
            p for p in psutil.Process().children() if any("cell" in word for word in p.cmdline())
        ]

    asyncio.run(cancelled())
    assert children() == []
