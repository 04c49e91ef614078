"""Sampled tokens and rewards to aligned rollouts: what the server was given and what it sampled, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamrl.envs.base import Answer, Env, Problem
from streamrl.inference.client import Sampled
from streamrl.records import Rollout, Turn


class Task(NamedTuple):
    """A problem under its names in the run. They follow from its number, so a group that is generated again has the same."""

    environment: str
    number: int
    producer: str
    problem: Problem

    @property
    def group_id(self) -> str:
        return f"{self.environment}-{self.number}"


def rollouts(task: Task, env: Env, samples: Sequence[Sampled], time_s: float) -> list[Rollout]:
    """One rollout a sample. A reward function that fails makes a failed rollout, with what it said."""
    return [_rollout(task, env, index, sampled, time_s) for index, sampled in enumerate(samples)]


def failures(task: Task, count: int, cause: str, policy_version: int) -> list[Rollout]:
    """The rollouts of a group that could not be generated: with them, the group can close."""
    return [_failed(task, index, cause, policy_version) for index in range(count)]


def _rollout(task: Task, env: Env, index: int, sampled: Sampled, time_s: float) -> Rollout:
    versions = [span.version for span in sampled.version_spans]
    try:
        rewards = env.rewards(task.problem, Answer(sampled.text, sampled.finish_reason == "stop"))
        reward = float(sum(rewards.values()))
        asked = "\n".join(str(message["content"]) for message in task.problem.messages)
        prompt = Turn(message=asked, role="user", tokens=sampled.prompt_tokens, timestamp=time_s - sampled.latency_s)
        answer = Turn(
            message=sampled.text,
            role="assistant",
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            reward=reward,
            inference_metadata=sampled.metadata(),
            timestamp=time_s,
        )
        return Rollout(
            environment=task.environment,
            problem_id=str(task.number),
            rollout_uid=f"{task.group_id}-{index}",
            turns=[prompt, answer],
            metadata=dict(task.problem.metadata),
            group_id=task.group_id,
            producer=task.producer,
            reward=reward,
            rewards=rewards,
            temperature=sampled.temperature,
            policy_version=min(versions),
            newest_policy_version=max(versions),
            truncated=sampled.finish_reason == "length",
        )
    except Exception as error:  # an env is somebody else's code: whatever it raises is this rollout's failure
        return _failed(task, index, f"{type(error).__name__}: {error}", max(min(versions, default=0), 0))


def _failed(task: Task, index: int, cause: str, policy_version: int) -> Rollout:
    return Rollout(
        environment=task.environment,
        problem_id=str(task.number),
        rollout_uid=f"{task.group_id}-{index}",
        turns=[],
        group_id=task.group_id,
        producer=task.producer,
        policy_version=policy_version,
        newest_policy_version=policy_version,
        failure=cause,
    )
