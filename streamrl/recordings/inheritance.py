"""What a fork at version k has of its parent's rollouts, and in which order: decided from journals
and batches alone. Pure.

It has the groups that no batch before k was trained on and that batch k may still take, as far as
versions up to k sampled them: what later ones sampled belongs to the parent's own history. Among
them are those that the parent's batcher held when it made batch k. They come first, and all of them
before the version is heard: the first batch is then chosen from the same groups as the parent's
was, whatever the new settings make of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from streamrl.batcher import process as batcher
from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.batcher.state import BatcherConfig, BatcherState
from streamrl.buffer.staleness import is_fresh
from streamrl.config import topology
from streamrl.log.chunks import joined
from streamrl.log.codec import to_event, to_message
from streamrl.log.protocol import Event, Output
from streamrl.records import Batch, Rollout, ScoredGroup

GroupKey = tuple[str, str]  # env, group id


@dataclass
class GroupIndex:
    """What decides whether a fork inherits a recorded group. It takes some hundred bytes a group."""

    producers: dict[GroupKey, str] = field(default_factory=dict[GroupKey, str])
    # version of the newest token
    newest: dict[GroupKey, int] = field(default_factory=dict[GroupKey, int])
    # version of the oldest token, of the rollout where that is newest
    youngest: dict[GroupKey, int] = field(default_factory=dict[GroupKey, int])
    # in a batch that the fork shares with its parent
    trained: dict[GroupKey, None] = field(default_factory=dict[GroupKey, None])

    def add_rollout(self, rollout: Rollout) -> None:
        group = rollout.environment, rollout.group_id
        self.producers.setdefault(group, rollout.producer)
        self.newest[group] = max(self.newest.get(group, -1), rollout.newest_policy_version)
        if not rollout.failure:
            self.youngest[group] = max(self.youngest.get(group, -1), rollout.policy_version)

    def add_batch(self, batch: Batch) -> None:
        self.trained.update(
            dict.fromkeys(
                zip(
                    (batch.environments[i] for i in batch.group_environments),
                    batch.group_ids,
                    strict=True,
                )
            )
        )

    def inherited(self, version: int, max_age: int) -> dict[GroupKey, None]:
        """The groups that a fork at `version` has, under its own `max_age`."""
        return {
            group: None
            for group, youngest in self.youngest.items()
            if group not in self.trained
            and self.newest[group] <= version
            and is_fresh(version, youngest, max_age)
        }


@dataclass
class BatcherCut:
    """The state of the parent's batcher when it made batch `number`, or its last one before that.

    `step` is folded over the batcher's journal.
    """

    number: int
    batch: Batch | None = None
    version: int = -1  # the newest it had heard
    balance: dict[str, float] = field(default_factory=dict[str, float])
    held: list[GroupKey] = field(default_factory=list[GroupKey])  # in the order it held them

    def step(
        self, config: BatcherConfig, state: BatcherState, events: Iterable[Event], time_s: float
    ) -> tuple[BatcherState, list[Output]]:
        """The batcher's step, one event at a time, up to the one with which it makes the batch."""
        for event in events:
            if self.batch is not None:
                break
            state, _ = batcher.step(config, state, [event], time_s, before=self.number)
            builder = BatchBuilder(config, state, time_s)
            if state.next_batch == self.number and builder.batch_is_due():
                self.remember(state)
                builder.build()
                self.batch = batch_of(builder.outputs)
        return state, []

    def remember(self, state: BatcherState) -> None:
        """Keep the state from before the batch is made, which takes its groups out."""
        self.version, self.balance = state.version, dict(state.deficit)
        held = (
            held.event.record
            for of_env in state.queues.values()
            for held in (*of_env.groups, *of_env.ahead)
        )
        self.held = [
            (record.environment, record.group_id)
            for record in held
            if isinstance(record, ScoredGroup)
        ]


def batch_of(outputs: Iterable[Output]) -> Batch | None:
    """The batch among these outputs, which may be in parts where the run is an earlier one."""
    written = [to_message(output) for output in outputs if output.topic == topology.BATCHES]
    for message in joined(written):
        record = to_event(message, ("batch",)).record
        if isinstance(record, Batch):
            return record
    return None


def next_problem(replicas_at: Collection[int], replica: int, replicas: int) -> int:
    """The first problem that replica `replica` of `replicas` is to pose: behind all that the
    parent's replicas have posed, and its own turn.
    """
    behind = max(replicas_at, default=0)
    return behind + (replica - behind) % replicas
