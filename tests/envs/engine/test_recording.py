"""What a session is given of what was recorded of it, and what it counts as lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from streamrl.config.sections.envs import Env
from streamrl.envs.api import PolicyClient, Problem
from streamrl.envs.engine.recording import RecordedCalls, TurnRecorder
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.inference.clients.client import SamplingFailed
from streamrl.stream.log.codec import encode, to_event
from streamrl.stream.records import ModelCall, Rollout
from tests.envs.engine.test_session import ASKED, Counted, Leader, once

SCHEMAS = ("session-start", "model-call")


def played(env: Leader, policy: Counted, recorder: TurnRecorder) -> tuple[Rollout, RecordedCalls]:
    """One rollout, whose calls are in the log as soon as they are made; and these calls."""
    runner = RolloutRunner(env, Env(max_tokens=9), policy, recorder=recorder)
    calls: RecordedCalls = {}

    async def play() -> Rollout:
        playing = asyncio.create_task(runner.run_group(Task("x", 0, "x-0", env.problem(0)), 1))
        while not playing.done():
            for message in recorder.drain():
                record = to_event(message, SCHEMAS).record
                if isinstance(record, ModelCall):
                    calls[record.request] = record
            recorder.on_commit()
            await asyncio.sleep(0)
        (made,) = await playing
        return made

    return asyncio.run(play()), calls


def asks(*texts: str) -> Leader:
    """An env that says these one after another."""

    async def converse(ask: PolicyClient, notes: dict[str, Any]) -> None:
        messages = list(ASKED)
        for text in ("", *texts):
            if text:
                messages.append({"role": "user", "content": text})
            said = await ask(messages)
            messages.append({"role": "assistant", "content": said.text})

    return Leader(converse)


def texts(rollout: Rollout) -> list[str]:
    return [turn.message for turn in rollout.turns]


def test_what_is_recorded_is_not_sampled_again():
    first, calls = played(asks("b", "c"), Counted("one", "two", "three"), TurnRecorder("x"))
    assert len(calls) == 3
    policy = Counted("other", "other", "other")
    recorder = TurnRecorder("x", {"x-0-0": calls})
    again, new = played(asks("b", "c"), policy, recorder)
    assert encode(again) == encode(first)
    assert (policy.requests, new) == (0, {})
    assert recorder.lost_s == 0


def test_an_env_that_asks_something_else_goes_on_from_where_it_differs():
    _, calls = played(asks("b", "c"), Counted("one", "two", "three"), TurnRecorder("x"))
    slow = {name: with_latency(call, 2.0) for name, call in calls.items()}
    policy = Counted("other", "new", "newer")
    recorder = TurnRecorder("x", {"x-0-0": slow})
    made, new = played(asks("B", "C"), policy, recorder)
    assert texts(made) == ["ab", "one", "B", "new", "C", "newer"]
    assert not any(turn.fork for turn in made.turns)
    assert len(new) == 2
    # the first answer was of use, the other two were not
    assert (recorder.kept_s, recorder.lost_s) == (2.0, 4.0)


def test_a_conversation_waits_until_its_last_answer_is_in_the_log():
    policy = Counted("one", "two")
    recorder = TurnRecorder("x")
    runner = RolloutRunner(asks("b"), Env(max_tokens=9), policy, recorder=recorder)

    async def play() -> None:
        task = Task("x", 0, "x-0", runner.env.problem(0))
        playing = asyncio.create_task(runner.run_group(task, 1))
        while not policy.requests:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert policy.requests == 1
        recorder.drain()
        recorder.on_commit()
        await playing

    asyncio.run(play())
    assert policy.requests == 2


class World(Leader):
    """Takes a step for each answer, which cannot be taken twice. What it asks follows from how many
    it has taken.
    """

    def __init__(self, steps: list[int]) -> None:
        super().__init__(once)
        self.steps = steps

    def save_state(self, notes: dict[str, Any]) -> Any:
        return {"messages": notes["messages"], "steps": notes["n"]}

    async def load_state(self, problem: Problem, state: Any, notes: dict[str, Any]) -> None:
        notes["messages"] = state["messages"]
        notes["n"] = state["steps"]

    async def converse(self, problem: Problem, ask: PolicyClient, notes: dict[str, Any]) -> None:
        messages = notes.setdefault("messages", list(ASKED))
        step = notes.setdefault("n", 0)
        while step < 3:
            said = await ask(messages)
            messages += [
                {"role": "assistant", "content": said.text},
                {"role": "user", "content": f"step {step}"},
            ]
            self.steps.append(step)
            step += 1
            notes["n"] = step


@pytest.mark.parametrize("recorded", range(4))
def test_an_env_with_a_state_goes_on_from_its_last_recorded_request(recorded: int):
    whole, calls = played(World([]), Counted("one", "two", "three"), TurnRecorder("x"))
    assert [call.state["steps"] for call in calls.values()] == [0, 1, 2]
    steps: list[int] = []
    kept = dict(list(calls.items())[:recorded])
    policy = Counted("one", "two", "three")
    again, new = played(World(steps), policy, TurnRecorder("x", {"x-0-0": kept}))
    assert [turn.tokens.tolist() for turn in again.turns if turn.tokens is not None] == [
        turn.tokens.tolist() for turn in whole.turns if turn.tokens is not None
    ]
    assert texts(again) == texts(whole)
    assert again.rewards == whole.rewards
    assert policy.requests == len(new) == 3 - recorded
    # the step behind the last recorded request may not have been taken, those before it have
    assert steps == [0, 1, 2][max(recorded - 1, 0) :]


def test_an_env_that_asks_something_else_than_its_state_says_fails():
    class Forgetful(World):
        async def load_state(self, problem: Problem, state: Any, notes: dict[str, Any]) -> None:
            notes["messages"] = [{"role": "user", "content": "what was it?"}]

    _, calls = played(World([]), Counted("one", "two", "three"), TurnRecorder("x"))
    policy = Counted("other")
    with pytest.raises(SamplingFailed, match="save all that converse goes by"):
        played(Forgetful([]), policy, TurnRecorder("x", {"x-0-0": calls}))
    assert policy.requests == 0


def test_a_state_that_is_too_large_is_that_rollouts_failure():
    class Large(World):
        def save_state(self, notes: dict[str, Any]) -> Any:
            return "x" * 70_000

    with pytest.raises(SamplingFailed, match="65,536 are allowed"):
        played(Large([]), Counted("one"), TurnRecorder("x"))


def with_latency(call: ModelCall, latency_s: float) -> ModelCall:
    how = structs.replace(call.inference_metadata, latency_s=latency_s)
    return structs.replace(call, inference_metadata=how)
