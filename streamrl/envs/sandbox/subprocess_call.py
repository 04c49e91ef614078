"""Calls a library's function on unreviewed text. The function may hang, take all
memory, or run code in the text.

Each call has its own process. It is forked from a parent that has imported what the function
needs, it is confined (`limits.py`) before it is given the text, and it is ended when its time is
over. It has an environment without secrets and no open files, and no other call sees what a call
does to its process. Arguments and results are lines of JSON. The parent starts with the first call,
and ends with its owner, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.envs.engine.time_limits import borrowed
from streamrl.envs.sandbox.limits import SandboxLimits, confine, die_with_parent, require_sandbox
from streamrl.system.errors import describe_error

START_S = 60.0  # The time to import what the function needs.
# After so much more than the limit of a call, the parent itself is taken to hang.
GRACE_S = 10.0
MIB = 1 << 20
# The variables that the processes get. Others may hold credentials.
ENVIRONMENT = ("PATH", "HOME", "MPLCONFIGDIR", "PYTHONPATH", "PYTHONHASHSEED", "TZ", "TMPDIR")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class CallFailed(Exception):
    """A call did not come to an end: it took too long, or it ended its process."""


class SubprocessCall:
    """MODULE:FUNCTION, to be called one call at a time. `close` ends its processes.

    `prepare` is a MODULE:FUNCTION that makes once what does not depend on the text. The parent,
    which is not confined, calls it first, with all arguments but the last one. Raises NoSandbox if
    a process cannot be confined.
    """

    def __init__(self, function: str, limits: SandboxLimits, prepare: str = "") -> None:
        require_sandbox(limits.allow_reading)
        self.function = function
        self.limits = limits
        self.prepare = prepare
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __call__(self, *arguments: Any) -> Any:
        """What the function returns. Raises CallFailed if that takes longer than the limit or the
        process dies, and RuntimeError with what the function raised.
        """
        timeout_s = self.limits.timeout_s
        async with self._turn:  # the time in the queue does not count
            process = await self._ensure_started()
            try:
                async with asyncio.timeout(timeout_s + GRACE_S):
                    answer = await self._ask(process, list(arguments))
            except TimeoutError:
                await self.close()
                raise CallFailed(f"{self.function} took longer than {timeout_s:g} s") from None
            except BaseException:
                # it was cancelled or died; what its pipe still holds must not answer the next call
                await self.close()
                raise
        if "gone" in answer:
            raise CallFailed(f"{self.function} {answer['gone']}")
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    async def close(self) -> None:
        """End the processes. The next call starts them again."""
        process = self._process
        self._process = None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    # asyncio's own `kill` may take the exit code away from the caller that waits
                    os.kill(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            with contextlib.suppress(ValueError):
                # asyncio does not see the end of a pipe before all in it has been read
                await process.stdout.read()
            await process.wait()

    async def _ensure_started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            settings = [self.function, self.prepare, self.limits.dump()]
            kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *["-m", "streamrl.envs.sandbox.subprocess_call", *settings],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=2 * MIB,
                env={**kept, **ONE_THREAD, "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
            )
            try:
                async with asyncio.timeout(START_S):
                    ready = await self._read_line(self._process)
            except BaseException:
                await self.close()
                raise
            if "error" in ready:
                await self.close()
                raise RuntimeError(ready["error"])
        return self._process

    async def _ask(
        self, process: asyncio.subprocess.Process, arguments: list[Any]
    ) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it died, and the answer will report it
            await process.stdin.drain()
        return await self._read_line(process)

    async def _read_line(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise CallFailed(f"{self.function} ended its process with code {await process.wait()}")
        return json.loads(line)


class SubprocessPool:
    """MODULE:FUNCTION in `processes` processes, each of which answers one call at a time. The other
    arguments are those of SubprocessCall. The time in the queue does not count.
    """

    def __init__(self, function: str, limits: SandboxLimits, prepare: str, processes: int) -> None:
        self._calls = [SubprocessCall(function, limits, prepare) for _ in range(processes)]
        # last in, first out: a process that has started is taken before one that has not
        self._idle: asyncio.LifoQueue[SubprocessCall] = asyncio.LifoQueue()
        for call in self._calls:
            self._idle.put_nowait(call)

    async def __call__(self, *arguments: Any) -> Any:
        async with borrowed(self._idle) as call:
            return await call(*arguments)

    async def close(self) -> None:
        for call in self._calls:
            await call.close()


def serve(path: str, prepare: str, limits: SandboxLimits) -> None:
    """Be the parent: import the function, and answer until the input ends."""
    die_with_parent()
    questions = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what the function prints must not be taken for an answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        function = _import(path)
        prepare_function = _import(prepare) if prepare else None
    except Exception as error:
        say({"error": describe_error(error)})
        return
    say({})
    private = (questions.fileno(), answers.fileno())
    for line in questions:
        try:
            arguments = json.loads(line)
            if prepare_function:
                prepare_function(*arguments[:-1])
            say(call_in_child(function, arguments, limits, private))
        except Exception as error:
            say({"error": describe_error(error)})


def call_in_child(
    function: Callable[..., Any],
    arguments: list[Any],
    limits: SandboxLimits,
    private: tuple[int, ...],
) -> dict[str, Any]:
    """The answer of a process that is made for this call. Whatever it writes is taken for data. It
    does not get the file descriptors in `private`.
    """
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            for descriptor in (out, *private):
                os.close(descriptor)
            os.dup2(0, 1)  # the null device: the text must not write into the env's log
            os.dup2(0, 2)
            confine(limits, readable_directories())
            answer = _answer(function, arguments)
            with os.fdopen(into, "w") as pipe:
                pipe.write(json.dumps(answer))
        finally:
            os._exit(0)
    os.close(into)
    output, late = _read(out, time.monotonic() + limits.timeout_s)
    os.close(out)
    os.kill(child, signal.SIGKILL)  # it may have closed its pipe and gone on
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if late:
        return {"gone": f"took longer than {limits.timeout_s:g} s"}
    try:
        answer = json.loads(output)
        if "value" in answer:
            return {"value": answer["value"]}
        return {"error": str(answer["error"])[:400]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"gone": f"ended its process with code {code}"}


def _answer(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """What the function returns, or what it raised."""
    try:
        answer = {"value": function(*arguments)}
        json.dumps(answer)
        return answer
    except Exception as error:
        return {"error": describe_error(error)}


def _read(out: int, until_s: float) -> tuple[bytes, bool]:
    """All that is written into the pipe, and whether it took too long or was too much."""
    output = b""
    while len(output) <= MIB:
        ready, _, _ = select.select([out], [], [], max(until_s - time.monotonic(), 0))
        if not ready:
            return b"", True
        piece = os.read(out, MIB)
        if not piece:
            return output, False
        output += piece
    return b"", True


def readable_directories() -> list[str]:
    """The directories of the modules that Python has here, without the directory that a run is
    started in.
    """
    prefixes = tuple({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    installed = [
        path
        for path in map(os.path.realpath, sys.path)
        if path.startswith(prefixes) and os.path.isdir(path)
    ]
    return [*installed, str(Path(__file__).resolve().parents[2])]


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], SandboxLimits.parse(sys.argv[3]))
