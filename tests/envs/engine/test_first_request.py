"""One request for the first answers of those rollouts of a group that begin now."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.api import Problem
from streamrl.envs.engine.first_request import FirstRequest
from streamrl.inference.clients.client import SamplingFailed
from tests.envs.talking import Scripted

PROBLEM = Problem([{"role": "user", "content": "q"}])


def test_all_who_ask_share_a_request_that_has_an_answer_for_each():
    policy = Scripted("hi")
    request = FirstRequest(PROBLEM, [1, 3], Env(max_tokens=9), policy)

    async def ask() -> list[int]:
        both = await asyncio.gather(request.answers(), request.answers())
        await request.close()
        return [len(answers) for answers in both]

    assert asyncio.run(ask()) == [2, 2]
    assert len(policy.prompts) == 1


def test_who_leaves_does_not_take_the_answer_from_the_others():
    request = FirstRequest(PROBLEM, [0, 1], Env(max_tokens=9), Scripted(0.05))

    async def ask() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(request.answers(), 0.001)
        return (await request.answers())[0].text

    assert asyncio.run(ask()) == "late"


def test_a_request_that_fails_fails_for_all():
    request = FirstRequest(PROBLEM, [0], Env(), Scripted(SamplingFailed("no server")))

    async def ask() -> None:
        for _ in range(2):
            with pytest.raises(SamplingFailed, match="no server"):
                await request.answers()
        await request.close()

    asyncio.run(ask())
