"""A function that may hang or take all memory: a call that does is over in time, and the next one
works.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from streamrl.envs.sandbox.limits import SandboxLimits
from streamrl.envs.sandbox.subprocess_call import (
    ENVIRONMENT,
    ONE_THREAD,
    CallFailed,
    SubprocessCall,
)
from tests.support.waiting import until

HERE = "tests.envs.sandbox.test_subprocess_call"


def double(x: int) -> int:
    print("not an answer")
    return 2 * x


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def fill() -> None:
    bytearray(10**11)


def die() -> None:
    os._exit(7)


@asynccontextmanager
async def bounded(function: str, timeout_s: float = 30.0) -> AsyncIterator[SubprocessCall]:
    made = SubprocessCall(f"{HERE}:{function}", SandboxLimits(timeout_s, 1024))
    try:
        yield made
    finally:
        await made.close()


async def test_it_answers_and_keeps_its_process():
    async with bounded("double") as function:
        assert await asyncio.gather(*[function(i) for i in range(5)]) == [0, 2, 4, 6, 8]
        first = function._process
        assert await function(7) == 14 and function._process is first


async def test_a_call_that_hangs_is_over_in_time_stalls_nobody_and_the_next_one_works():
    async with bounded("sleep", timeout_s=1.0) as function:
        assert await function(0) == "awake"
        ticks = 0
        hanging = asyncio.create_task(function(3600))
        while not hanging.done():
            await asyncio.sleep(0.05)
            ticks += 1
        with pytest.raises(CallFailed, match="took longer than 1 s"):
            await hanging
        assert ticks >= 3  # others went on meanwhile
        assert await function(0) == "awake"


async def test_memory_and_death_are_that_calls_own():
    async with bounded("fill") as function:
        with pytest.raises(RuntimeError, match="MemoryError"):
            await function()
    async with bounded("die") as function:
        for _ in range(2):
            with pytest.raises(CallFailed, match="ended its process with code 7"):
                await function()


async def test_what_is_not_there_is_named():
    async with bounded("nowhere") as function:
        with pytest.raises(RuntimeError, match="AttributeError.*nowhere"):
            await function()


def environment() -> list[str]:
    return [*os.environ]


HELD: list[int] = []


def remember(x: int) -> list[int]:
    HELD.append(x)
    return HELD


async def test_it_has_no_secret_and_nothing_of_the_call_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_KAFKA_PASSWORD", "hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    async with bounded("environment") as function:
        assert set(await function()) <= {
            *ENVIRONMENT,
            *ONE_THREAD,
            "LC_ALL",
            "PYTHONDONTWRITEBYTECODE",
            "LC_CTYPE",
        }
    async with bounded("remember") as function:
        assert await function(1) == [1] and await function(2) == [2]


def close_and_spin() -> None:
    os.closerange(3, 64)
    while True:
        pass


async def test_a_call_that_closes_its_pipe_and_goes_on_is_ended():
    async with bounded("close_and_spin", timeout_s=3600) as function:
        with pytest.raises(CallFailed, match="ended its process"):
            await function()


async def test_a_cancelled_call_leaves_no_answer_to_the_next():
    async with bounded("sleep") as function:
        assert await function(0) == "awake"
        call = asyncio.create_task(function(0.3))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        started = time.monotonic()
        assert await function(0.5) == "awake" and time.monotonic() - started >= 0.5


OWNER = f"""
import asyncio, os, sys
from streamrl.envs.sandbox.limits import SandboxLimits
from streamrl.envs.sandbox.subprocess_call import SubprocessCall
async def main():
    function = SubprocessCall("{HERE}:sleep", SandboxLimits(60, 1024))
    await function(0)
    print(function._process.pid, flush=True)
    await function(60)
asyncio.run(main())
"""


def test_it_dies_with_its_owner_in_mid_call():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )
