"""Runs Python that nobody has read, in a process of its own that can only compute (`limits.py`,
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
from streamrl.envs.sandbox.limits import NoSandbox

OUTPUT_BYTES = 65_536  # A program that prints more is ended.
ANSWER_BYTES = 1 << 20  # The largest result of a call.
START_S = 60.0  # The time to start and confine a process; it does not count for the program.
MIB = 1 << 20
End = Literal["ok", "error", "time", "memory", "output"]


class ProgramResult(NamedTuple):
    """How the run of a program went."""

    end: End  # why it ended
    passed: list[bool]  # for each test, whether it passed
    output: str  # what the program printed, errors included


async def run(
    program: str,
    tests: Sequence[str] = (),
    timeout_s: float = 5.0,
    memory_mib: int = 256,
    allow_reading: bool = False,
) -> ProgramResult:
    """Run the program, then each test with the program's names. A test passes if it raises nothing.
    All of this together may take `timeout_s`.

    A test calls functions of the program with plain data and is given plain data: numbers, text,
    bytes, None, and lists, tuples, sets and dicts of them. Raises NoSandbox if a process cannot be
    confined.
    """
    passed = [False] * len(tests)
    roles = ("program", "examiner") if tests else ("program",)
    async with contextlib.AsyncExitStack() as stack:
        arguments = (str(memory_mib * MIB), str(int(timeout_s) + 1), str(allow_reading))
        cells = await asyncio.gather(
            *[stack.enter_async_context(_started(role, *arguments)) for role in roles]
        )
        output = asyncio.create_task(_output(cells[0]))
        stack.push_async_callback(_cancelled, output)
        late = False
        try:
            async with asyncio.timeout(timeout_s):
                ran = await _answer(cells[0], {"source": program}) is not None
                if ran and tests:
                    await _examined(cells[0], cells[1], tests, passed)
                _end_input(cells[0])
                said = await output
                code = await cells[0].wait()
        except TimeoutError:
            late = True
            _kill(cells[0])
            said = await output
            code = await cells[0].wait()
    return ProgramResult(
        "time" if late else _ended(code, said),
        passed,
        said[:OUTPUT_BYTES].decode("utf-8", "replace").strip(),
    )


@asynccontextmanager
async def _started(role: str, *arguments: str) -> AsyncIterator[Process]:
    """A confined process, which is ended with the block. Raises NoSandbox."""
    command = [
        "-I",
        "-S",
        "-B",
        "-c",
        cell.START,
        str(Path(cell.__file__).parents[3]),
        role,
        *arguments,
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
        said = json.loads(ready)
        if "unconfined" in said:
            raise NoSandbox(f"there is no sandbox on this machine: {said['unconfined']}")
        yield process
    finally:
        _kill(process)
        _end_input(process)
        # asyncio does not see the end of a pipe before all that is left in it has been read
        for stream in (process.stdout, process.stderr):
            with contextlib.suppress(ValueError):
                await stream.read()
        await process.wait()


async def _examined(
    program: Process, examiner: Process, tests: Sequence[str], passed: list[bool]
) -> None:
    """Pass the examiner's questions to the program, and write into `passed` how each test went."""
    said = await _answer(examiner, {"tests": list(tests)})
    while said is not None:
        heard: dict[str, Any] = json.loads(said)
        if "ask" in heard:
            answer = await _answer(program, heard["ask"])
            said = await _sent(
                examiner,
                answer or b'{"raised": "RuntimeError", "message": "the program has ended"}\n',
            )
        else:
            passed[heard["test"]] = heard["passed"]
            if heard["test"] == len(tests) - 1:
                return
            said = await _line(examiner)


async def _answer(process: Process, question: dict[str, Any]) -> bytes | None:
    """The line that the process answers with."""
    return await _sent(process, json.dumps(question).encode() + b"\n")


async def _sent(process: Process, line: bytes) -> bytes | None:
    """The line that the process answers to this one; None if it has ended, or says too much."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(line)
        await process.stdin.drain()
    return await _line(process)


async def _line(process: Process) -> bytes | None:
    """The next line that the process says; None if it has ended, or was ended for its length."""
    assert process.stdout is not None
    try:
        return await process.stdout.readline() or None
    except ValueError:  # longer than ANSWER_BYTES
        _kill(process)
        return None


async def _output(process: Process) -> bytes:
    """All that the process prints. If that is too much, the process is ended."""
    assert process.stderr is not None
    said = bytearray()
    while chunk := await process.stderr.read(OUTPUT_BYTES):
        said += chunk
        if len(said) > OUTPUT_BYTES:
            _kill(process)
            break
    return bytes(said)


def _kill(process: Process) -> None:
    """Kill the process and its group. asyncio's own `kill` may take the exit code away from whoever
    waits for it.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end_input(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()


async def _cancelled(task: asyncio.Task[bytes]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _ended(code: int, said: bytes) -> End:
    if len(said) > OUTPUT_BYTES:
        return "output"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "time"
    if code:
        return "memory" if b"MemoryError" in said else "error"
    return "ok"
