"""Sampled tokens and rewards to aligned rollouts: what the server was given and what it sampled,
token for token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import structs

from streamrl.envs.api import Answer, Env, Leads, Message, Problem, Said, one_line
from streamrl.envs.engine.rewards import Linear
from streamrl.inference.client import Sampled
from streamrl.log.codec import decode, encode
from streamrl.records import Rollout, Turn


class NoProblem(Exception):
    """The env has failed to pose a problem; the message says how."""


class Task(NamedTuple):
    """A problem under its names in the run. They follow from its number, so a group that is
    generated again has the same.
    """

    environment: str
    number: int
    producer: str
    problem: Problem

    @property
    def group_id(self) -> str:
        return f"{self.environment}-{self.number}"


def pose(env: Env | Leads, number: int) -> Problem:
    """Raises NoProblem, whatever the env raises."""
    try:
        problem = env.problem(number)
        if not isinstance(problem, Problem):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"not a Problem but {type(problem).__name__}")
        # what follows has to be rendered behind messages that say the same
        if len(problem.tokens) and hasattr(env, "reply"):
            raise ValueError("a prompt of token ids is for one turn, and this env replies")
    except Exception as error:  # an env is somebody else's code
        raise NoProblem(f"problem {number}: {one_line(error)}") from error
    return problem


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """What messages say, as it stands in a rollout's turn."""
    return "\n".join(str(message.get("content") or "") for message in messages)


@dataclass
class Talk:
    """A conversation as it goes: what was said, by whom, and the very tokens of it."""

    problem: Problem
    messages: list[Message]
    turns: list[Turn] = field(default_factory=list[Turn])
    samples: list[Sampled] = field(default_factory=list[Sampled])
    truncation: str = ""  # which limit has ended it
    note: str = ""  # what there is to say about that

    @classmethod
    def begun(cls, problem: Problem, first: Sampled, time_s: float) -> Talk:
        """With the policy's first answer, which came at `time_s`."""
        talk = cls(problem, [])
        talk.heard(problem.messages, first, time_s)
        return talk

    def heard(self, asked: Sequence[Message], sampled: Sampled, time_s: float) -> None:
        """The policy was asked, and has answered. Where its prompt does not go on from what was
        there, a sequence of its own begins.
        """
        prompt = Turn(
            message=text_of(asked),
            role=str(asked[-1]["role"]) if self.turns else "user",
            tokens=sampled.prompt_tokens[sampled.kept :],
            fork=bool(self.turns) and not sampled.kept,
            timestamp=time_s - sampled.latency_s,
        )
        answer = Turn(
            message=sampled.text,
            role="assistant",
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            inference_metadata=sampled.metadata(),
            timestamp=time_s,
        )
        self.turns += [prompt, answer]
        self.samples.append(sampled)
        self.messages += [*asked, {"role": "assistant", "content": sampled.text}]
        if sampled.finish_reason == "length":
            self.truncation = "length"

    @property
    def said(self) -> list[Said]:
        return [Said(sampled.text, sampled.tokens) for sampled in self.samples]

    @property
    def history(self) -> list[int]:
        """What the policy has seen and said so far, in the sequence it is in."""
        last = self.samples[-1]
        return [*last.prompt_tokens.tolist(), *last.tokens.tolist()]

    @property
    def answer(self) -> Answer:
        return Answer(
            self.samples[-1].text, not self.truncation, self.said, self.messages, self.truncation
        )

    @property
    def versions(self) -> list[int]:
        return [span.version for sampled in self.samples for span in sampled.version_spans]


def aligned(task: Task, index: int, talk: Talk, earned: Linear) -> Rollout:
    """The rollout of a conversation. Raises ValueError, or whatever msgspec raises, when it is not
    one that a reader would take.
    """
    limit = (
        {"truncation": talk.truncation, **({"cause": talk.note} if talk.note else {})}
        if talk.truncation
        else {}
    )
    rollout = Rollout(
        environment=task.environment,
        problem_id=str(task.number),
        rollout_uid=f"{task.group_id}-{index}",
        turns=_with_rewards(talk.turns, earned),
        metadata={**task.problem.metadata, **limit},
        group_id=task.group_id,
        producer=task.producer,
        reward=earned.reward,
        rewards=earned.totals,
        temperature=talk.samples[0].temperature,
        policy_version=min(talk.versions),
        newest_policy_version=max(talk.versions),
        truncated=bool(talk.truncation),
    )
    # what a reader would refuse is found here, where its group can still close
    decode("rollout/1", encode(rollout))
    return rollout


def failures(task: Task, count: int, cause: str, policy_version: int) -> list[Rollout]:
    """The rollouts of a group that could not be generated: with them, the group can close."""
    return [failed(task, index, cause, policy_version) for index in range(count)]


def failed(task: Task, index: int, cause: str, policy_version: int) -> Rollout:
    """A rollout that there is nothing of."""
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


def _with_rewards(turns: Sequence[Turn], earned: Linear) -> list[Turn]:
    """Each of the policy's turns with what it earned. The only turn there is has earned all that
    the rollout has.
    """
    found, own = list[Turn](), 0
    alone = len(earned.turn_rewards) == 1
    for turn in turns:
        if turn.logprobs is None:
            found.append(turn)
            continue
        tokens = earned.token_rewards[own]
        rest = earned.reward - (0.0 if tokens is None else float(tokens.sum(dtype="f8")))
        given = {
            "rewards": earned.totals if alone and tokens is None else earned.turns[own],
            "token_rewards": tokens,
            "reward": rest if alone else earned.turn_rewards[own] or None,
        }
        found.append(structs.replace(turn, **given))
        own += 1
    return found
