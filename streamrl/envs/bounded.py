"""A function that may hang, or take all memory, in a process of its own: a call that does is over in time, and the next has a new process.

Arguments and result are JSON, a line each. The process starts with the first call, and ends with its owner, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

START_S = 60.0  # to import what the function needs
MIB = 1 << 20


class Gone(Exception):
    """A call did not come to an end: it took too long, or ended its process."""


class Bounded:
    """MODULE:FUNCTION, called one at a time. `close` ends its process."""

    def __init__(self, function: str, timeout_s: float, memory_mib: int) -> None:
        self.function, self.timeout_s, self.memory_mib = function, timeout_s, memory_mib
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __call__(self, *arguments: Any) -> Any:
        """What the function returns. Raises Gone after `timeout_s`, and when the process died; RuntimeError with what the function raised."""
        async with self._turn:  # who waits for another's call has all of its own time still
            process = await self._started()
            try:
                async with asyncio.timeout(self.timeout_s):
                    answer = await self._ask(process, list(arguments))
            except TimeoutError:
                await self.close()
                raise Gone(f"{self.function} took longer than {self.timeout_s:g} s") from None
            except BaseException:  # cancelled, or died: what its pipe still holds is no answer to the next call
                await self.close()
                raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdout is not None
            await process.stdout.read()  # what is left in the pipe: asyncio does not see the end before
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            line = ["-m", "streamrl.envs.bounded", self.function, str(self.memory_mib * MIB)]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *line, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MIB
            )
            try:
                async with asyncio.timeout(START_S):
                    ready = await self._line(self._process)
            except BaseException:
                await self.close()
                raise
            if "error" in ready:
                raise RuntimeError(ready["error"])
        return self._process

    async def _ask(self, process: asyncio.subprocess.Process, arguments: list[Any]) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it died: the answer says so
            await process.stdin.drain()
        return await self._line(process)

    async def _line(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise Gone(f"{self.function} ended its process with code {await process.wait()}")
        return json.loads(line)


def serve(path: str, memory_bytes: int) -> None:
    """The other side: answers until its input ends."""
    from streamrl.envs import limits  # Linux only

    limits.die_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is no answer

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    try:
        module, _, name = path.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:
        say({"error": _told(error)})
        return
    limits.memory(memory_bytes)
    say({})
    for line in sys.stdin:
        try:
            say({"value": function(*json.loads(line))})
        except Exception as error:
            say({"error": _told(error)})


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
