"""The conversation of a rollout, token for token, and the record that is published of it."""

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
from streamrl.envs.sessions import rollouts
from streamrl.envs.sessions.call_tree import CallTree
from streamrl.envs.sessions.rewards import WeightedRewards, with_rewards
from streamrl.envs.sessions.rollouts import (
    RolloutName,
    in_order_of_turns,
    sampled_versions,
    to_turns,
)
from streamrl.stream.records import ModelCall, Rollout
from streamrl.stream.records.compact import wide_ids


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

    def name(self, index: int) -> RolloutName:
        """The name of a rollout of its group. The uid is also the name of its session."""
        return RolloutName(
            environment=self.environment,
            problem_id=str(self.number),
            uid=f"{self.group_id}-{index}",
            group_id=self.group_id,
            producer=self.producer,
        )


@dataclass
class Transcript:
    """The conversation of a rollout so far: its messages, and the model calls of the policy."""

    problem: Problem
    messages: list[Message] = field(default_factory=list[Message])
    tree: CallTree = field(default_factory=CallTree)
    truncation: str = ""  # the limit that has ended it
    note: str = ""  # more about that

    def append(self, messages: Sequence[Message], call: ModelCall) -> None:
        """Add a request, which is a whole conversation, and the policy's answer to it."""
        self.tree.add(call)
        self.messages = [*messages, {"role": "assistant", "content": call.text}]
        if call.inference_metadata.finish_reason == "length":
            self.truncation = "length"

    @property
    def calls(self) -> list[ModelCall]:
        """The model calls of the rollout, in the order in which they were made."""
        return list(self.tree.calls.values())

    @property
    def completion(self) -> Completion:
        """All answers of the policy, as reward functions are given them."""
        calls = self.calls
        return Completion(
            text=calls[-1].text,
            finished=not self.truncation,
            turns=[PolicyTurn(call.text, wide_ids(call.tokens)) for call in calls],
            messages=self.messages,
            truncation=self.truncation,
        )

    @property
    def turn_lengths(self) -> list[int]:
        """The number of sampled tokens of each turn of the policy."""
        return [len(call.tokens) for call in self.calls]

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled it, in order."""
        return sampled_versions(self.calls)


def transcript_to_rollout(
    task: Task, index: int, transcript: Transcript, rewards: WeightedRewards
) -> Rollout:
    """The record of a rollout. Raises ValueError, or whatever msgspec raises, if a reader would
    refuse the record.
    """
    metadata = {**task.problem.metadata}
    if transcript.truncation:
        metadata["truncation"] = transcript.truncation
        if transcript.note:
            metadata["cause"] = transcript.note
    calls = transcript.calls
    if len(calls) > 1:
        ids = [call.call for call in calls]
        rewards = rewards.in_order([ids.index(call.call) for call in in_order_of_turns(calls)])
    return rollouts.build_rollout(
        name=task.name(index),
        calls=calls,
        turns=with_rewards(to_turns(calls), rewards),
        reward=rewards.reward,
        rewards=rewards.totals,
        metadata=metadata,
        is_truncated=bool(transcript.truncation),
    )


def failed_group(task: Task, count: int, cause: str, policy_version: int) -> list[Rollout]:
    """The rollouts of a group that could not be generated. With them the group can close."""
    return [
        rollouts.build_failed_rollout(task.name(index), cause, policy_version)
        for index in range(count)
    ]
