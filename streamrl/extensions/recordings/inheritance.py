"""Decides which of its parent's rollouts a fork at version k inherits, and in which order. The
decision follows from journals and batches alone. Pure.

A fork inherits the groups that are in no batch before k, that batch k may still take, and that only
versions up to k have sampled. What later versions sampled belongs to the parent's own history.
The groups that the parent's batcher held when it made batch k come first, and the version comes
after them. So the fork chooses its first batch from the groups from which the parent chose its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from streamrl.batcher import process as batcher
from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.batcher.state import BatcherConfig, BatcherState
from streamrl.buffer.staleness import is_fresh
from streamrl.stream.log.protocol import Event, Output
from streamrl.stream.records import Batch, Rollout, ScoredGroup

GroupKey = tuple[str, str]  # env, group id


@dataclass
class GroupIndex:
    """The facts about recorded groups that decide whether a fork inherits them. A group takes some
    hundred bytes.
    """

    producers: dict[GroupKey, str] = field(default_factory=dict[GroupKey, str])
    # the policy version of the newest token in the group
    newest: dict[GroupKey, int] = field(default_factory=dict[GroupKey, int])
    # the policy version of the freshest rollout; that of a rollout is its oldest token's
    youngest: dict[GroupKey, int] = field(default_factory=dict[GroupKey, int])
    # the groups in batches that the fork shares with its parent
    trained: dict[GroupKey, None] = field(default_factory=dict[GroupKey, None])

    def add_rollout(self, rollout: Rollout) -> None:
        """Add a recorded rollout to the facts about its group."""
        group = rollout.environment, rollout.group_id
        self.producers.setdefault(group, rollout.producer)
        self.newest[group] = max(self.newest.get(group, -1), rollout.newest_policy_version)
        if not rollout.failure:
            self.youngest[group] = max(self.youngest.get(group, -1), rollout.policy_version)

    def add_batch(self, batch: Batch) -> None:
        """Mark the groups of a batch as trained on."""
        for env, group_id in zip(batch.group_environments, batch.group_ids, strict=True):
            self.trained[batch.environments[env], group_id] = None

    def inherited(self, version: int, max_age: int) -> dict[GroupKey, None]:
        """The groups that a fork at `version` inherits, under its own `max_age` in versions."""
        return {
            group: None
            for group, youngest in self.youngest.items()
            if group not in self.trained
            and self.newest[group] <= version
            and is_fresh(version, youngest, max_age)
        }


@dataclass
class BatcherCut:
    """The state of the parent's batcher just before it made batch `number`, or its last state if it
    has not made that batch. `step` finds it while the batcher's journal is replayed.
    """

    number: int
    batch: Batch | None = None
    version: int = -1  # the newest version that the batcher had read
    balance: dict[str, float] = field(default_factory=dict[str, float])
    held: list[GroupKey] = field(default_factory=list[GroupKey])  # in the batcher's order

    def step(
        self, config: BatcherConfig, state: BatcherState, events: Iterable[Event], time_s: float
    ) -> tuple[BatcherState, list[Output]]:
        """The batcher's step, which stops at the event that completes the batch. No outputs."""
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
        """Keep what is needed of a state. A batch that is made later removes its groups from it."""
        self.version = state.version
        self.balance = dict(state.deficit)
        self.held = []
        for queue in state.queues.values():
            for held in (*queue.groups, *queue.ahead):
                record = held.event.record
                if isinstance(record, ScoredGroup):
                    self.held.append((record.environment, record.group_id))


def batch_of(outputs: Iterable[Output]) -> Batch | None:
    """The batch among these outputs, or None."""
    return next((output.record for output in outputs if isinstance(output.record, Batch)), None)


def next_problem(parents_next: Collection[int], replica: int, replicas: int) -> int:
    """The index of the first problem for replica number `replica` of `replicas`.

    It is the first of this replica's indices that no replica of the parent has posed.
    `parents_next` has the next index of each of them.
    """
    first = max(parents_next, default=0)
    return first + (replica - first) % replicas
