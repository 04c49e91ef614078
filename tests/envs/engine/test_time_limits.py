"""Time limits on the code of others, and what does not count towards them."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.time_limits import TimeLimitExceeded, acquired
from tests.support.waiting import patience


class Slow(SingleTurnEnv):
    """Its reward is a plain function that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def problem(self, number: int) -> Problem:
        return Problem([])

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        time.sleep(self.seconds)
        return {"done": 1.0}


async def test_a_plain_reward_that_is_late_fails_and_the_event_loop_goes_on_meanwhile():
    # type: ignore[arg-type]  # nothing is sampled
    runner = RolloutRunner(Slow(1.0), Env(env_timeout_s=0.3), None)
    ticks = 0
    judging = asyncio.create_task(
        runner.call(runner.env.rewards, Problem([]), Completion("", True), what="its rewards")
    )  # type: ignore[union-attr]
    while not judging.done():
        await asyncio.sleep(0.01)
        ticks += 1
    with pytest.raises(TimeLimitExceeded, match="its rewards took longer than 0.3 s"):
        await judging
    assert ticks >= 3


async def test_time_in_the_queue_for_a_thread_or_a_process_does_not_count():
    """Nine rewards, one after the other, take longer than one of them may: none of them is late."""
    limit_s = patience(0.4)

    class Queued(Slow):
        def __init__(self) -> None:
            super().__init__(0)
            self.free = asyncio.Semaphore(1)

        async def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
            async with acquired(self.free):
                await asyncio.sleep(limit_s / 4)
            return {"done": 1.0}

    for env in (Slow(limit_s / 4), Queued()):
        runner = RolloutRunner(env, Env(env_timeout_s=limit_s), None, threads=asyncio.Semaphore(1))  # type: ignore[arg-type]
        started = time.monotonic()
        found = await asyncio.gather(
            *[
                runner.call(env.rewards, Problem([]), Completion("", True), what="its rewards")
                for _ in range(9)
            ]
        )
        assert found == [{"done": 1.0}] * 9 and time.monotonic() - started > limit_s
