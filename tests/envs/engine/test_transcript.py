from __future__ import annotations

import asyncio

import numpy as np
import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task, failed_group
from streamrl.inference.clients.client import SampledCompletion
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records import Rollout, VersionSpan
from streamrl.stream.records.compact import compact_logprobs
from tests.support.build import floats, tokens

TASK = Task(
    "copy", 7, "copy-0", Problem([{"role": "user", "content": "47="}], "47", {"level": "easy"})
)


class Rewarding(SingleTurnEnv):
    def __init__(self, value: object) -> None:
        self.value = value

    def problem(self, number: int) -> Problem:
        raise NotImplementedError

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"digits": self.value, "finished": float(completion.finished)}  # type: ignore[dict-item]


def sampled(finish_reason: str = "stop") -> SampledCompletion:
    spans = [VersionSpan(version=3, start=0, end=1), VersionSpan(version=5, start=1, end=3)]
    return SampledCompletion(
        server_id="inference-0",
        prompt_tokens=tokens(1, 8, 11, 15),
        tokens=tokens(8, 11, 2),
        logprobs=floats(-0.1, -0.2, -0.3),
        text="47",
        finish_reason=finish_reason,
        version_spans=spans,
        latency_s=0.5,
        temperature=0.7,
        top_p=1.0,
        top_k=-1,
        max_tokens=3,
    )


def made_of(task: Task, env: Rewarding, sample: SampledCompletion) -> Rollout:
    """The rollout of a problem that is answered with this sample."""

    class Once:
        async def sample(self, *arguments: object) -> list[SampledCompletion]:
            return [sample]

    (made,) = asyncio.run(RolloutRunner(env, Env(), Once()).run_group(task, 1))
    return made


def test_tokens_logprobs_and_versions_are_those_of_the_server():
    made = made_of(TASK, Rewarding(0.5), sampled())
    prompt, answer = made.turns
    assert (made.environment, made.group_id, made.rollout_uid, made.problem_id, made.producer) == (
        "copy",
        "copy-7",
        "copy-7-0",
        "7",
        "copy-0",
    )
    assert (
        prompt.tokens is not None
        and prompt.tokens.tolist() == [1, 8, 11, 15]
        and prompt.logprobs is None
        and prompt.message == "47="
    )
    assert (
        answer.tokens is not None
        and answer.tokens.tolist() == [8, 11, 2]
        and np.array_equal(answer.logprobs, compact_logprobs(floats(-0.1, -0.2, -0.3)))
    )  # type: ignore[arg-type]
    assert (made.policy_version, made.newest_policy_version, made.temperature, made.truncated) == (
        3,
        5,
        0.7,
        False,
    )
    assert (made.reward, made.rewards, answer.reward, made.metadata) == (
        1.5,
        {"digits": 0.5, "finished": 1.0},
        1.5,
        {"level": "easy"},
    )
    assert answer.rewards == made.rewards
    how = answer.inference_metadata
    assert how is not None and (how.server, how.temperature, how.finish_reason, how.latency_s) == (
        "inference-0",
        0.7,
        "stop",
        0.5,
    )
    assert prompt.timestamp is not None and answer.timestamp == pytest.approx(
        prompt.timestamp + 0.5
    )


def test_cut_off_by_a_limit_is_truncated():
    made = made_of(TASK, Rewarding(0.5), sampled("length"))
    assert (
        made.truncated and made.metadata["truncation"] == "length" and made.rewards["finished"] == 0
    )


def test_a_reward_that_cannot_be_computed_is_that_rollouts_failure():
    for value, says in (
        (KeyError("x"), "KeyError: 'x'"),
        (float("nan"), "a reward is not finite"),
        ("high", "could not convert string to float"),
    ):
        made = made_of(TASK, Rewarding(value), sampled())
        assert says in made.failure and made.turns == [] and made.group_id == "copy-7"


def test_rewards_travel_as_floats_whatever_a_comparison_gave():
    made = made_of(TASK, Rewarding(np.bool_(True)), sampled())
    assert made.failure == "" and decode("rollout/1", encode(made)).rewards == {
        "digits": 1.0,
        "finished": 1.0,
    }  # type: ignore[attr-defined]


@pytest.mark.parametrize("metadata", [{"a": object()}, {1: "a number as a key"}, {"a": "\ud83d"}])
def test_metadata_that_no_reader_could_read_is_that_rollouts_failure(metadata: dict[str, object]):
    made = made_of(TASK._replace(problem=Problem([], "47", metadata)), Rewarding(0.5), sampled())
    assert made.failure and decode("rollout/1", encode(made)) == made


def test_a_generation_that_failed_is_a_whole_group_of_failures():
    made = failed_group(TASK, 3, "server gone", policy_version=4)
    assert [r.rollout_uid for r in made] == ["copy-7-0", "copy-7-1", "copy-7-2"]
    assert {(r.failure, r.policy_version) for r in made} == {("server gone", 4)}
