"""Somebody else's function over text that nobody has read: it may hang, take all memory, or run
what the text says.

Each call has a process of its own, forked from one that has imported what the function needs,
confined (`limits.py`) before it is given the text, and ended when its time is over. It is given an
environment without secrets and no open files, and what one call does to its process no other call
sees. Arguments and result are JSON, a line each. The processes start with the first call, and end
with their owner, however that ends.
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

from streamrl.envs.sandbox import limits
from streamrl.errors import describe_error

START_S = 60.0  # to import what the function needs
# the parent's own limit is later by so much: then the process that forks hangs itself
GRACE_S = 10.0
MIB = 1 << 20
# All that is handed on of the environment; the rest may hold credentials.
ENVIRONMENT = ("PATH", "HOME", "MPLCONFIGDIR", "PYTHONPATH", "PYTHONHASHSEED", "TZ", "TMPDIR")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class CallFailed(Exception):
    """A call did not come to an end: it took too long, or ended its process."""


class SubprocessCall:
    """MODULE:FUNCTION, called one at a time. `close` ends its processes.

    `prepare`: MODULE:FUNCTION that is called first, with all arguments but the last one, by the
    process that is not confined and that all calls are forked from: to make, once, what does not
    depend on the text. Raises limits.NoSandbox where a process cannot be confined; `allow_reading`
    as `limits.confine` has it.
    """

    def __init__(
        self,
        function: str,
        timeout_s: float,
        memory_mib: int,
        prepare: str = "",
        allow_reading: bool = False,
    ) -> None:
        limits.require_sandbox(allow_reading)
        self.function, self.timeout_s, self.memory_mib = function, timeout_s, memory_mib
        self.prepare, self.allow_reading = prepare, allow_reading
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __call__(self, *arguments: Any) -> Any:
        """What the function returns. Raises CallFailed after `timeout_s`, and when the process died;
        RuntimeError with what the function raised.
        """
        async with self._turn:  # who waits for another's call has all of its own time still
            process = await self._started()
            try:
                async with asyncio.timeout(self.timeout_s + GRACE_S):
                    answer = await self._ask(process, list(arguments))
            except TimeoutError:
                await self.close()
                raise CallFailed(f"{self.function} took longer than {self.timeout_s:g} s") from None
            except BaseException:
                # cancelled, or died: what its pipe still holds is no answer to the next call
                await self.close()
                raise
        if "gone" in answer:
            raise CallFailed(f"{self.function} {answer['gone']}")
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    # its own method may take the exit code away from whoever waits for it
                    os.kill(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            with contextlib.suppress(ValueError):
                # what is left in the pipe: asyncio does not see the end before
                await process.stdout.read()
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            settings = [
                self.function,
                self.prepare,
                str(self.timeout_s),
                str(self.memory_mib * MIB),
                str(self.allow_reading),
            ]
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
                    ready = await self._line(self._process)
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
        with contextlib.suppress(ConnectionError):  # it died: the answer says so
            await process.stdin.drain()
        return await self._line(process)

    async def _line(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise CallFailed(f"{self.function} ended its process with code {await process.wait()}")
        return json.loads(line)


def serve(
    path: str, prepare: str, timeout_s: float, memory_bytes: int, allow_reading: bool
) -> None:
    """The process that forks: imports, and answers until its input ends."""
    limits.die_with_parent()
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the function prints is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        function = _imported(path)
        prepared = _imported(prepare) if prepare else None
    except Exception as error:
        say({"error": describe_error(error)})
        return
    say({})
    for line in asked:
        try:
            arguments = json.loads(line)
            if prepared:
                prepared(*arguments[:-1])
            say(
                _called(
                    function,
                    arguments,
                    timeout_s,
                    memory_bytes,
                    allow_reading,
                    (asked.fileno(), answers.fileno()),
                    nothing,
                )
            )
        except Exception as error:
            say({"error": describe_error(error)})


def _called(
    function: Callable[..., Any],
    arguments: list[Any],
    timeout_s: float,
    memory_bytes: int,
    allow_reading: bool,
    private: tuple[int, ...],
    nothing: int,
) -> dict[str, Any]:
    """The answer of a process made for this call. What it writes is taken for data, whatever it is."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            for descriptor in (out, *private):
                os.close(descriptor)
            os.dup2(nothing, 1)  # the env's log is not the text's to write
            os.dup2(nothing, 2)
            limits.confine(memory_bytes, int(timeout_s) + 1, readable(), allow_reading)
            answer = _answer(function, arguments)
            with os.fdopen(into, "w") as pipe:
                pipe.write(json.dumps(answer))
        finally:
            os._exit(0)
    os.close(into)
    said, late = _read(out, time.monotonic() + timeout_s)
    os.close(out)
    os.kill(child, signal.SIGKILL)  # it may have closed its pipe and gone on
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if late:
        return {"gone": f"took longer than {timeout_s:g} s"}
    try:
        answer = json.loads(said)
        return (
            {"value": answer["value"]}
            if "value" in answer
            else {"error": str(answer["error"])[:400]}
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"gone": f"ended its process with code {code}"}


def _answer(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        answer = {"value": function(*arguments)}
        json.dumps(answer)
        return answer
    except Exception as error:
        return {"error": describe_error(error)}


def _read(out: int, until_s: float) -> tuple[bytes, bool]:
    """All that is written there up to a size; and whether it took too long."""
    said = b""
    while len(said) <= MIB:
        ready, _, _ = select.select([out], [], [], max(until_s - time.monotonic(), 0))
        if not ready:
            return b"", True
        piece = os.read(out, MIB)
        if not piece:
            return said, False
        said += piece
    return b"", True


def readable() -> list[str]:
    """Where the modules lie that Python has here; nothing of the directory that a run is started
    in.
    """
    prefixes = tuple({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    found = [
        path
        for path in map(os.path.realpath, sys.path)
        if path.startswith(prefixes) and os.path.isdir(path)
    ]
    return [*found, str(Path(__file__).resolve().parents[2])]


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "True")
