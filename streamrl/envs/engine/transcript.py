"""What was said in a rollout, token for token, and the record that is published of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.envs.api import (
    Completion,
    Message,
    PolicyTurn,
    Problem,
)
from streamrl.envs.engine.rewards import WeightedRewards, with_rewards
from streamrl.inference.client import Sampled
from streamrl.log.codec import decode, encode
from streamrl.records import Rollout, Turn
from streamrl.sessions.messages import joined_text


class Task(NamedTuple):
    """A problem under its names in the run. They follow from its number, so a group that is
    generated again has the same names.
    """

    environment: str
    number: int
    producer: str
    problem: Problem

    @property
    def group_id(self) -> str:
        return f"{self.environment}-{self.number}"


@dataclass
class Transcript:
    """A conversation as it goes on: what was said, by whom, and the exact tokens of it."""

    problem: Problem
    messages: list[Message] = field(default_factory=list[Message])
    turns: list[Turn] = field(default_factory=list[Turn])
    samples: list[Sampled] = field(default_factory=list[Sampled])
    truncation: str = ""  # the limit that has ended it
    note: str = ""  # what there is to say about that

    def append(self, prompt: Sequence[Message], sampled: Sampled, time_s: float) -> None:
        """Add what the policy was asked and what it said. If its prompt does not go on from the
        tokens so far, a sequence of its own begins (a fork).
        """
        asked = Turn(
            message=joined_text(prompt),
            role=str(prompt[-1]["role"]) if self.turns else "user",
            tokens=sampled.prompt_tokens[sampled.prefix_tokens :],
            fork=bool(self.turns) and not sampled.prefix_tokens,
            timestamp=time_s - sampled.latency_s,
        )
        said = Turn(
            message=sampled.text,
            role="assistant",
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            inference_metadata=sampled.metadata(),
            timestamp=time_s,
        )
        self.turns += [asked, said]
        self.samples.append(sampled)
        self.messages += [*prompt, {"role": "assistant", "content": sampled.text}]
        if sampled.finish_reason == "length":
            self.truncation = "length"

    @property
    def history(self) -> list[int]:
        """The tokens that the policy has seen and said so far, in the sequence that it is in."""
        if not self.samples:
            return []
        last = self.samples[-1]
        return [*last.prompt_tokens.tolist(), *last.tokens.tolist()]

    @property
    def server(self) -> str:
        """The server that answered last; empty before the first answer."""
        return self.samples[-1].server_id if self.samples else ""

    @property
    def completion(self) -> Completion:
        """What the policy said, as rewards are given for it."""
        return Completion(
            text=self.samples[-1].text,
            finished=not self.truncation,
            turns=[PolicyTurn(sampled.text, sampled.tokens) for sampled in self.samples],
            messages=self.messages,
            truncation=self.truncation,
        )

    @property
    def turn_lengths(self) -> list[int]:
        """The number of sampled tokens of each turn of the policy."""
        return [len(sampled.tokens) for sampled in self.samples]

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled it, in order."""
        return [span.version for sampled in self.samples for span in sampled.version_spans]


def to_rollout(task: Task, index: int, transcript: Transcript, rewards: WeightedRewards) -> Rollout:
    """The record of a rollout. Raises ValueError, or whatever msgspec raises, if a reader would
    refuse it.
    """
    metadata = {**task.problem.metadata}
    if transcript.truncation:
        metadata["truncation"] = transcript.truncation
        if transcript.note:
            metadata["cause"] = transcript.note
    rollout = Rollout(
        environment=task.environment,
        problem_id=str(task.number),
        rollout_uid=f"{task.group_id}-{index}",
        turns=with_rewards(transcript.turns, rewards),
        metadata=metadata,
        group_id=task.group_id,
        producer=task.producer,
        reward=rewards.reward,
        rewards=rewards.totals,
        temperature=transcript.samples[0].temperature,
        policy_version=min(transcript.versions),
        newest_policy_version=max(transcript.versions),
        truncated=bool(transcript.truncation),
    )
    # what a reader would refuse is found here, where the group can still close
    decode("rollout/1", encode(rollout))
    return rollout


def failed_rollouts(task: Task, count: int, cause: str, policy_version: int) -> list[Rollout]:
    """The rollouts of a group that could not be generated. With them the group can close."""
    return [failed_rollout(task, index, cause, policy_version) for index in range(count)]


def failed_rollout(task: Task, index: int, cause: str, policy_version: int) -> Rollout:
    """A rollout without turns, which says why there are none."""
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
