"""What a session is given of what was recorded of it, and what it counts as lost."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import structs

from streamrl.config import run_file
from streamrl.envs.api import PolicyClient
from streamrl.envs.engine.recording import RecordedCalls, TurnRecorder
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.log.codec import encode, to_event
from streamrl.records import ModelCall, Rollout
from tests.envs.engine.test_session import ASKED, Counted, Leader

SCHEMAS = ("session-start", "model-call")


def played(env: Leader, policy: Counted, recorder: TurnRecorder) -> tuple[Rollout, RecordedCalls]:
    """One rollout, whose calls are in the log as soon as they are made; and these calls."""
    runner = RolloutRunner(env, run_file.Env(max_tokens=9), policy, recorder=recorder)
    calls: RecordedCalls = {}

    async def play() -> Rollout:
        playing = asyncio.create_task(runner.run_group(Task("x", 0, "x-0", env.problem(0)), 1))
        while not playing.done():
            for message in recorder.take():
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
    runner = RolloutRunner(asks("b"), run_file.Env(max_tokens=9), policy, recorder=recorder)

    async def play() -> None:
        task = Task("x", 0, "x-0", runner.env.problem(0))
        playing = asyncio.create_task(runner.run_group(task, 1))
        while not policy.requests:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert policy.requests == 1
        recorder.take()
        recorder.on_commit()
        await playing

    asyncio.run(play())
    assert policy.requests == 2


def with_latency(call: ModelCall, latency_s: float) -> ModelCall:
    how = structs.replace(call.inference_metadata, latency_s=latency_s)
    return structs.replace(call, inference_metadata=how)
