"""Runs unreviewed Python in a separate process that can only compute (`limits.py`,
`cell.py`).

The process has no network, starts and signals no other process, writes no file and reads none but
Python's own, and its time, memory and output are limited. Tests run in a second such process, which
asks the first for the results of calls. What a test expects never enters the process of the
program, and only plain data leaves it. Nothing is run if the kernel has no seccomp or no Landlock.
This does not protect from holes in the kernel itself; for that, run the env in a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from streamrl.envs.sandbox import cell
from streamrl.envs.sandbox.limits import NoSandbox, SandboxLimits

OUTPUT_BYTES = 65_536  # A program that prints more is ended.
ANSWER_BYTES = 1 << 20  # The largest result of a call.
DEFAULT_LIMITS = SandboxLimits()
START_S = 60.0  # The time to start and confine a process; it does not count for the program.
End = Literal["ok", "error", "time", "memory", "output"]


class ProgramResult(NamedTuple):
    """How the run of a program went."""

    end: End  # why it ended
    passed: list[bool]  # for each test, whether it passed
    output: str  # what the program printed, errors included


async def run(
    program: str, tests: Sequence[str] = (), limits: SandboxLimits = DEFAULT_LIMITS
) -> ProgramResult:
    """Run the program, then each test with the program's names. A test passes if it raises nothing.
    All of this together may take `limits.timeout_s`.

    A test calls functions of the program with plain data and is given plain data: numbers, text,
    bytes, None, and lists, tuples, sets and dicts of them. Raises NoSandbox if a process cannot be
    confined.
    """
    passed = [False] * len(tests)
    roles = ("program", "examiner") if tests else ("program",)
    async with contextlib.AsyncExitStack() as stack:
        cells = await asyncio.gather(
            *[stack.enter_async_context(start_process(role, limits)) for role in roles]
        )
        printing = asyncio.create_task(_read_output(cells[0]))
        stack.push_async_callback(_cancel, printing)
        late = False
        try:
            async with asyncio.timeout(limits.timeout_s):
                ran = await _ask(cells[0], {"source": program}) is not None
                if ran and tests:
                    await _examine(cells[0], cells[1], tests, passed)
                _end_input(cells[0])
                output = await printing
                code = await cells[0].wait()
        except TimeoutError:
            late = True
            _kill(cells[0])
            output = await printing
            code = await cells[0].wait()
    return ProgramResult(
        "time" if late else _end_of(code, output),
        passed,
        output[:OUTPUT_BYTES].decode("utf-8", "replace").strip(),
    )


@asynccontextmanager
async def start_process(role: str, limits: SandboxLimits) -> AsyncIterator[Process]:
    """A confined process, which is ended with the block. Raises NoSandbox."""
    command = [
        "-I",
        "-S",
        "-B",
        "-c",
        cell.START,
        str(Path(cell.__file__).parents[3]),
        role,
        limits.dump(),
    ]
    environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        cwd="/",
        env=environment,
        start_new_session=True,
        limit=ANSWER_BYTES,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(START_S):
            ready = await process.stdout.readline()
            if not ready:
                errors = " ".join((await process.stderr.read()).decode().split())
                raise NoSandbox(f"there is no sandbox on this machine: {errors[-300:]}")
        if problem := json.loads(ready).get("unconfined"):
            raise NoSandbox(f"there is no sandbox on this machine: {problem}")
        yield process
    finally:
        _kill(process)
        _end_input(process)
        # asyncio does not see the end of a pipe before all that is left in it has been read
        for stream in (process.stdout, process.stderr):
            with contextlib.suppress(ValueError):
                await stream.read()
        await process.wait()


async def _examine(
    program: Process, examiner: Process, tests: Sequence[str], passed: list[bool]
) -> None:
    """Pass the examiner's questions to the program, and write into `passed` how each test went."""
    line = await _ask(examiner, {"tests": list(tests)})
    while line is not None:
        message: dict[str, Any] = json.loads(line)
        if "ask" in message:
            answer = await _ask(program, message["ask"])
            line = await _send_line(
                examiner,
                answer or b'{"raised": "RuntimeError", "message": "the program has ended"}\n',
            )
        else:
            passed[message["test"]] = message["passed"]
            if message["test"] == len(tests) - 1:
                return
            line = await _read_line(examiner)


async def _ask(process: Process, question: dict[str, Any]) -> bytes | None:
    """The line that the process answers with."""
    return await _send_line(process, json.dumps(question).encode() + b"\n")


async def _send_line(process: Process, line: bytes) -> bytes | None:
    """Send a line. Returns the one that the process answers with; None if it has ended, or answers
    too much.
    """
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(line)
        await process.stdin.drain()
    return await _read_line(process)


async def _read_line(process: Process) -> bytes | None:
    """The next line that the process writes; None if it has ended, or was ended for its length."""
    assert process.stdout is not None
    try:
        return await process.stdout.readline() or None
    except ValueError:  # longer than ANSWER_BYTES
        _kill(process)
        return None


async def _read_output(process: Process) -> bytes:
    """All that the process prints. If that is too much, the process is ended."""
    assert process.stderr is not None
    output = bytearray()
    while chunk := await process.stderr.read(OUTPUT_BYTES):
        output += chunk
        if len(output) > OUTPUT_BYTES:
            _kill(process)
            break
    return bytes(output)


def _kill(process: Process) -> None:
    """Kill the process and its group. asyncio's own `kill` may take the exit code away from the
    caller that waits for it.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end_input(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()


async def _cancel(task: asyncio.Task[bytes]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _end_of(code: int, output: bytes) -> End:
    if len(output) > OUTPUT_BYTES:
        return "output"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "time"
    if code:
        return "memory" if b"MemoryError" in output else "error"
    return "ok"
