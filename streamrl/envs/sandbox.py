"""Runs Python that nobody has read: in a process of its own with limits on time, memory and output, without network, and unable to write or start
things, or to read any file but its own and Python's.

It holds off accidents and the tricks of a policy that is rewarded for passing tests, not somebody who knows the kernel well. Where the kernel has no
Landlock (before Linux 5.13, or switched off) it may read what this user may read, which is said once. For worse, run the env in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from streamrl.envs import limits

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 65_536  # more than so much said is the end
MIB = 1 << 20


class Outcome(NamedTuple):
    """How it went."""

    end: Literal["ok", "error", "time", "memory", "output"]  # why it ended
    passed: list[bool]  # of each test
    output: str  # what it printed, errors too


async def run(program: str, tests: Sequence[str] = (), timeout_s: float = 5.0, memory_mib: int = 256) -> Outcome:
    """Run the program, then each test with the names it has defined; one that raises nothing passes. Raises OSError where nothing holds it in."""
    secret = secrets.token_hex(16)  # what the program prints is not taken for a result
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / name for name in ("program.py", *(f"test{i}.py" for i in range(len(tests))))]
        for file, text in zip(files, (program, *tests), strict=True):
            file.write_text(text, encoding="utf-8", errors="replace")
        line = ["-I", "-S", "-B", limits.__file__, str(memory_mib * MIB), str(int(timeout_s) + 1), *map(str, files)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *line,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=directory,
            env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        said, end = bytearray(), ""
        try:
            assert process.stdin is not None
            process.stdin.write(f"{secret}\n".encode())
            async with asyncio.timeout(timeout_s):
                end = "output" if not await _read(process, said) else ""
                if not end:
                    await process.wait()
        except TimeoutError:
            end = "time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            await process.stdout.read()  # what is left in the pipe: asyncio does not see the end before
            await process.wait()
    output = said.decode("utf-8", "replace")
    if f"{secret} ready but reads\n" in output:
        _say_that_it_reads()
    elif not end and f"{secret} ready\n" not in output:
        raise OSError(f"there is no sandbox on this machine: {' '.join(output.split())[-300:] or f'code {process.returncode}'}")
    return _outcome(output, end or _ended(process.returncode or 0, said), secret, len(tests))


@cache
def _say_that_it_reads() -> None:
    logger.warning("this kernel has no Landlock: programs in the sandbox can read what this user can; run the env in a container")


async def _read(process: asyncio.subprocess.Process, said: bytearray) -> bool:
    """All that it says; False when that is too much."""
    assert process.stdout is not None
    while chunk := await process.stdout.read(OUTPUT_BYTES):
        said += chunk
        if len(said) > OUTPUT_BYTES:
            return False
    return True


def _ended(code: int, said: bytearray) -> Literal["ok", "error", "time", "memory"]:
    if code == -signal.SIGXCPU or code == -signal.SIGKILL:
        return "time"
    if code:
        return "memory" if b"MemoryError" in said else "error"
    return "ok"


def _outcome(output: str, end: str, secret: str, tests: int) -> Outcome:
    mark = f"{secret} passed "
    passed = {line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark)}
    shown = "\n".join(line for line in output.splitlines() if not line.startswith(secret)).strip()
    return Outcome(end, [str(i) in passed for i in range(tests)], shown)  # type: ignore[arg-type]
