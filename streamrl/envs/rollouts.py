"""Sampled tokens and rewards to aligned rollouts: what the server was given and what it sampled, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamrl.envs.base import Answer, Env, Problem, one_line
from streamrl.inference.client import Sampled
from streamrl.records import Rollout, Turn
from streamrl.stream.codec import decode, encode


class NoProblem(Exception):
    """The env has failed to pose a problem; the message says how."""


class Task(NamedTuple):
    """A problem under its names in the run. They follow from its number, so a group that is generated again has the same."""

    environment: str
    number: int
    producer: str
    problem: Problem

    @property
    def group_id(self) -> str:
        return f"{self.environment}-{self.number}"


def pose(env: Env, number: int) -> Problem:
    """Raises NoProblem, whatever the env raises."""
    try:
        problem = env.problem(number)
        if not isinstance(problem, Problem):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"not a Problem but {type(problem).__name__}")
    except Exception as error:  # an env is somebody else's code
        raise NoProblem(f"problem {number}: {one_line(error)}") from error
    return problem


def rollouts(task: Task, env: Env, samples: Sequence[Sampled], time_s: float) -> list[Rollout]:
    """One rollout a sample. A reward function that fails, or metadata that does not travel, makes a failed rollout, with the cause."""
    return [_rollout(task, env, index, sampled, time_s) for index, sampled in enumerate(samples)]


def failures(task: Task, count: int, cause: str, policy_version: int) -> list[Rollout]:
    """The rollouts of a group that could not be generated: with them, the group can close."""
    return [_failed(task, index, cause, policy_version) for index in range(count)]


def _rollout(task: Task, env: Env, index: int, sampled: Sampled, time_s: float) -> Rollout:
    versions = [span.version for span in sampled.version_spans]
    try:
        named = env.rewards(task.problem, Answer(sampled.text, sampled.finish_reason == "stop"))
        rewards = {name: float(value) for name, value in named.items()}  # a comparison gives a bool, which does not travel as a float
        reward = sum(rewards.values())
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
        rollout = Rollout(
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
        decode("rollout/1", encode(rollout))  # what a reader would refuse is found here, where its group can still close
    except Exception as error:  # an env is somebody else's code: whatever it raises, or gives, is this rollout's failure
        return _failed(task, index, one_line(error), max(min(versions, default=0), 0))
    return rollout


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
        failure=cause.encode("utf-8", "replace").decode(),
    )
