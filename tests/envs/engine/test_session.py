"""Conversations that the env leads, with a policy that plays by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.api import (
    AgentLoopEnv,
    Message,
    PolicyClient,
    Problem,
    RewardBreakdown,
    RewardResult,
    Truncated,
)
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.inference.clients.client import SamplingFailed
from streamrl.stream.records import Rollout
from tests.envs.talking import Scripted

ASKED: list[Message] = [{"role": "user", "content": "ab"}]


class Leader(AgentLoopEnv):
    """Leads as it is told to; judges by how many it judges at once."""

    def __init__(
        self,
        how: Callable[[PolicyClient, dict[str, Any]], Coroutine[Any, Any, None]],
        judged: int | None = None,
    ) -> None:
        self.how = how
        self.judged = judged

    def problem(self, number: int) -> Problem:
        return Problem(ASKED)

    async def converse(self, problem: Problem, ask: PolicyClient, notes: dict[str, Any]) -> None:
        await self.how(ask, notes)

    async def judge(
        self, problem: Problem, notes: Sequence[Mapping[str, Any]]
    ) -> Sequence[RewardResult]:
        return [
            RewardBreakdown(
                {"together": float(len(notes)), "noted": float(noted.get("n", 0))},
                weights={"noted": 0.0},
            )
            for noted in notes[: self.judged]
        ]


class Counted(Scripted):
    requests = 0

    async def sample(self, messages: Any, n: int, env: Any, *more: Any) -> Any:
        self.requests += 1
        return await super().sample(messages, n, env, *more)


def play(env: Any, policy: Any, n: int = 1, **settings: Any) -> list[Rollout]:
    return asyncio.run(
        RolloutRunner(env, Env(max_tokens=9, **settings), policy).run_group(
            Task("x", 0, "x-0", env.problem(0)), n
        )
    )


async def once(ask: PolicyClient, notes: dict[str, Any]) -> None:
    notes["n"] = len((await ask(ASKED)).tokens)


async def twice(ask: PolicyClient, notes: dict[str, Any]) -> None:
    said = await ask(ASKED)
    await ask(
        [*ASKED, {"role": "assistant", "content": said.text}, {"role": "user", "content": "more"}]
    )


def test_the_first_question_of_a_group_is_one_request_and_rollouts_are_judged_together():
    policy = Counted("hi")
    made = play(Leader(once), policy, 3)
    assert (
        policy.requests == 1
        and [rollout.rewards for rollout in made] == [{"together": 3.0, "noted": 3.0}] * 3
    )
    # `noted` has a weight of the env's own
    assert [rollout.reward for rollout in made] == [3.0] * 3


def test_turns_go_on_from_what_was_sampled():
    (made,) = play(Leader(twice), Scripted("hi", "there"))
    assert [(turn.role, turn.message, turn.fork) for turn in made.turns] == [
        ("user", "ab", False),
        ("assistant", "hi", False),
        ("user", "more", False),
        ("assistant", "there", False),
    ]


def test_questions_at_the_same_time_are_asked_one_after_the_other_and_are_sequences_of_their_own():
    async def both(ask: PolicyClient, notes: dict[str, Any]) -> None:
        await asyncio.gather(ask(ASKED), ask([{"role": "user", "content": "cd"}]))

    (made,) = play(Leader(both), Scripted("hi", rewrites=True))
    assert [(turn.message, turn.fork) for turn in made.turns] == [
        ("ab", False),
        ("hi", False),
        ("cd", True),
        ("hi", False),
    ]


async def stopped(ask: PolicyClient, notes: dict[str, Any]) -> None:
    await once(ask, notes)
    raise Truncated("time", "its own")


async def broken(ask: PolicyClient, notes: dict[str, Any]) -> None:
    await once(ask, notes)
    raise TimeoutError("a tool's")


async def deaf(ask: PolicyClient, notes: dict[str, Any]) -> None:
    """Goes on asking when it is told that it is over."""
    await once(ask, notes)
    for _ in range(3):
        with pytest.raises(SamplingFailed):
            await ask(
                [
                    *ASKED,
                    {"role": "assistant", "content": "hi"},
                    {"role": "user", "content": "more"},
                ]
            )


async def late(ask: PolicyClient, notes: dict[str, Any]) -> None:
    await once(ask, notes)
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("how", "settings", "truncation"),
    [
        (stopped, {}, {"truncation": "time", "cause": "its own"}),
        (broken, {}, {"truncation": "tool-error", "cause": "TimeoutError: a tool's"}),
        (deaf, {"max_turns": 1}, {"truncation": "turns"}),
        (late, {"rollout_timeout_s": 1.0}, {"truncation": "time"}),
    ],
)
def test_a_limit_ends_it_truncated_with_what_was_noted(
    how: Any, settings: dict[str, Any], truncation: dict[str, str]
):
    (made,) = play(Leader(how), Scripted("hi"), **settings)
    assert made.truncated and made.metadata == truncation and made.rewards["noted"] == 3.0


def test_one_that_nothing_was_sampled_for_fails_alone():
    turns = iter([twice, silent])

    async def either(ask: PolicyClient, notes: dict[str, Any]) -> None:
        await next(turns)(ask, notes)

    made = play(Leader(either), Scripted("hi", "there"), 2)
    assert [rollout.failure for rollout in made] == [
        "",
        "the env ended it before the policy was asked",
    ]
    assert made[0].rewards["together"] == 1.0


async def silent(ask: PolicyClient, notes: dict[str, Any]) -> None:
    pass


def test_when_none_comes_to_anything_the_group_has_failed():
    with pytest.raises(SamplingFailed, match="no server"):
        play(Leader(once), Scripted(SamplingFailed("no server")), 2)


def test_rewards_that_are_not_one_a_rollout_fail_them():
    made = play(Leader(once, judged=1), Scripted("hi"), 2)
    assert [rollout.failure for rollout in made] == [
        "ValueError: rewards of 1 rollouts, where there are 2"
    ] * 2


def test_one_that_is_late_leaves_the_others_their_answer():
    """They share the request for the first turn."""
    turns = iter([asyncio.wait_for, None])

    async def either(ask: PolicyClient, notes: dict[str, Any]) -> None:
        impatient = next(turns)
        await (impatient(once(ask, notes), 0.05) if impatient else once(ask, notes))

    made = play(Leader(either), Scripted(0.5), 2)
    assert [bool(rollout.failure) for rollout in made] == [True, False] and made[1].rewards[
        "noted"
    ] == 5.0
