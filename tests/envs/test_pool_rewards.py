"""A judge in a pool of the run: it is asked by the pool's name, finds the servers by the log, and
one that dies costs no reward.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.envs import pool_rewards
from streamrl.envs.pool_rewards import connected, wait_until_ready
from streamrl.extensions.recordings.rescore import (
    RescoreResult,
    rescore,
    rewards_of_scorer,
    scorer_of,
)
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.system.errors import ConfigError, InferenceError
from tests.inference.stub import Stub
from tests.support.build import rollout_saying
from tests.support.data_path import publish
from tests.support.sampling_stub import SamplingStub
from tests.support.waiting import patience

ROLLOUTS = 60


def run_of(**params: Any) -> RunFile:
    judge = {"kind": "judge", "params": {"pool": "judge", "pause_s": 0.0, **params}}
    return parse(
        {
            "run": "r",
            "envs": {"copy": {"kind": "copy-digits", "rewards": {"quality": judge}}},
            "inference": {"pools": {"judge": {"replicas": 2, "model": "/judge"}}},
        }
    )


def score(prompt: str, choice: int) -> str:
    """What the judge says of `said N`."""
    (number,) = re.findall(r"said (\d+)", prompt)
    return f"Fine. Score: {int(number) % 11}"


def recorded() -> MemoryLog:
    log = MemoryLog({"rollouts.copy": 1, "rewards.copy": 1, "servers": 1})
    for number in range(ROLLOUTS):
        record = rollout_saying(number)
        publish(log, Output("rollouts.copy", record.group_id, record))
    return log


def rescored(
    log: MemoryLog, stubs: list[Stub], each: Callable[[int], None] = lambda done: None
) -> RescoreResult:
    """The judge's rewards, by a scorer that finds its servers by the log."""
    run = run_of()

    async def judged() -> RescoreResult:
        scorer = replace(scorer_of(run, "copy", "quality", "1"), env=None)

        async def beats() -> None:
            while True:
                for stub in stubs:
                    record = stub.record(pool="judge", version=-1)
                    if not stub.killed.is_set():
                        publish(log, Output("servers", stub.name, record))
                await asyncio.sleep(0.2)

        beating = asyncio.create_task(beats())
        try:
            async with connected(run, log, [scorer.function]) as clients:
                await wait_until_ready(clients)
                return await rescore(
                    log, "copy", scorer, {}, progress=lambda done, total: each(done)
                )
        finally:
            beating.cancel()

    return asyncio.run(asyncio.wait_for(judged(), patience(60)))


def values(log: MemoryLog) -> dict[str, float]:
    found = rewards_of_scorer(log, "copy", "quality", "1")
    return {uid: reward.value for uid, (reward,) in found.items() if not reward.failure}


def test_the_scorer_asks_the_pool_and_a_server_that_dies_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("streamrl.extensions.recordings.rescore.PORTION", 10)
    log = recorded()
    with (
        SamplingStub("inference-judge-0", score) as one,
        SamplingStub("inference-judge-1", score) as other,
    ):

        def kill(done: int) -> None:
            if done == 20:
                other.answer = lambda path, body: (500, {})  # type: ignore[method-assign]

        result = rescored(log, [one, other], kill)
        assert one.asked and other.asked
    assert (result.rescored, result.failed) == (ROLLOUTS, 0)
    assert values(log) == {f"g0-{number}": number % 11 / 10 for number in range(ROLLOUTS)}


def test_a_pool_without_servers_is_said_before_anything_is_judged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_rewards, "READY_S", 0.1)
    log = recorded()
    with pytest.raises(InferenceError, match="streamrl inference RUN --pool judge --index 0"):
        rescored(log, [])
    assert values(log) == {}


def test_without_a_reward_that_asks_a_pool_nothing_is_read():
    async def clients() -> list[Any]:
        async with connected(run_of(), MemoryLog({}), [len]) as found:
            return found

    assert asyncio.run(clients()) == []


def test_a_pool_that_the_run_does_not_have_is_refused():
    judge = {"kind": "judge", "params": {"pool": "judge"}}
    with pytest.raises(ConfigError, match="params.pool: inference.pools has no 'judge'"):
        parse({"run": "r", "envs": {"copy": {"rewards": {"quality": judge}}}})
