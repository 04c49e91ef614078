"""The batcher's configuration, and its state: the groups that wait in the queue of each env, and
what each share is owed.

The journal has BatcherConfig as JSON, and snapshots have BatcherState, both by the names of the
fields.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import numpy as np

from streamrl.batcher.curriculum import CurriculumRules, CurriculumState, fractions_of
from streamrl.batcher.selection import Candidate, rebase_deficit
from streamrl.stream.log.protocol import Event
from streamrl.stream.processor.awake_clock import AwakeClock
from streamrl.stream.records import Demand, JoinedGroup, ScoredGroup, first_of_rollout_mask

# The most producers of an env whose groups are counted: those of which a group has ended last. A
# program whose name is new with each life would otherwise make every demand longer.
COUNTED_PRODUCERS = 1_000
# A shortage that lasts longer than this is reported. What any env may supply is then asked of those
# alone that have sent something for the batch.
SHORTAGE_AFTER_S = 2.0
# The cost of a group is a mean over about so many groups.
RECENT_GROUPS = 256


@dataclass(frozen=True)
class BatcherConfig:
    """How batches are made and how much work is asked for."""

    # Fraction of a batch's tokens by env, where no curriculum decides it. Every env of the run is
    # here.
    fractions: dict[str, float]
    learner: str  # whose versions count
    total_token_budget: int
    max_seq_len: int
    row_count: int
    max_age: int  # policy versions
    lookahead: int
    spill: bool
    max_window_tokens: int  # of one env
    advantage: str = "none"  # the normalizer of a batch's advantages
    curriculum: CurriculumRules = field(default_factory=CurriculumRules)
    processes: int = 1  # that train on a batch
    balance: str = "tokens"  # what each process is to have as much of as the others
    hidden: int = 0  # hidden size of the model
    admission: str = "demand"
    # by env whose groups are granted one by one
    producers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    # by env: what a group is thought to cost before the first one has come
    group_tokens: dict[str, int] = field(default_factory=dict[str, int])
    # by env whose groups are granted: a replica that runs ends a group within this time
    group_limits_s: dict[str, float] = field(default_factory=dict[str, float])
    # policy versions, by env for which max_age is not the limit
    max_ages: dict[str, int] = field(default_factory=dict[str, int])
    # lengths of rows below max_seq_len (`packing.row_shapes`)
    row_lengths: list[int] = field(default_factory=list[int])

    def max_age_of(self, env: str) -> int:
        return self.max_ages.get(env, self.max_age)


class HeldGroup(msgspec.Struct, frozen=True):
    """A group that waits, and what decisions ask about it. Rollouts that are too long for a row do
    not count, as they have met their fate.
    """

    event: Event
    tokens: int
    rollouts: int
    oldest: int  # version of its oldest token: a group is as old as its oldest rollout
    newest: int
    of_newest: int  # rollouts that `newest` alone made
    partition: int  # of the env's topic of rollouts
    offsets: list[int]  # of its rollouts there


class EnvQueue(msgspec.Struct):
    """The groups of one env."""

    groups: list[HeldGroup] = []  # the oldest first, those of one age in the order they came
    ahead: list[HeldGroup] = []  # of versions that are not announced yet, in the same order
    tokens: int = 0  # of both
    rollouts: int = 0  # of both
    # by producer: groups that it may have begun, where they are granted
    granted: dict[str, int] = {}
    measured: int = 0  # groups that came with something to train on
    measured_tokens: int = 0  # the tokens of these groups
    # by producer: groups that came to an end in the buffer since the run began
    closed: dict[str, int] = {}
    epoch: int = 0  # groups of an earlier one are not counted (`Demand.epoch`)
    demand: Demand | None = None  # the last one published
    away: list[str] = []  # producers whose grants were taken back (`demand.absent_producers`)
    # by producer with groups open: when the last one ended, or when it was granted the first; by
    # the awake clock
    busy_since_s: dict[str, float] = {}
    last_batch: int = -1  # the newest batch with a group of this env

    @property
    def usable_tokens(self) -> int:
        return self.tokens - sum([held.tokens for held in self.ahead])

    @property
    def group_tokens(self) -> float:
        """What a group costs, on average. There has to be one."""
        return self.measured_tokens / self.measured

    def first_asked(self, asked_tokens: float) -> int:
        """The position of the oldest group that was asked for: from there on the groups have at
        most so many tokens. What the env has sent beyond that comes before it.
        """
        left = asked_tokens
        for position in reversed(range(len(self.groups))):
            left -= self.groups[position].tokens
            if left < 0:
                return position + 1
        return 0

    def candidate(self, env: str, number: int, first_asked: int = 0) -> Candidate | None:
        """Group number `number` in the order in which batches take them. None if there are not so
        many.

        The groups that were asked for come first, the oldest of them before the others, because
        the others can wait for the next batch. The groups beyond those come last, and the newest
        of them first, because some of them expire in any order. `first_asked`: the position of the
        first group that was asked for.
        """
        position = first_asked + number
        if position >= len(self.groups):
            position = len(self.groups) - 1 - number
        if position < 0:
            return None
        return Candidate(env, position, self.groups[position].tokens)

    def add(self, held: HeldGroup, announced: int) -> None:
        """Put the group in its place. `announced`: the newest announced version."""
        queue = self.ahead if held.newest > announced else self.groups
        insort(queue, held, key=lambda other: other.oldest)

    def remove(self, queue: list[HeldGroup], position: int) -> HeldGroup:
        """Take a group out of one of the two lists."""
        held = queue.pop(position)
        self.tokens -= held.tokens
        self.rollouts -= held.rollouts
        return held

    def count_closed(self, group: ScoredGroup) -> None:
        """Count the end of a group for its producer, unless it was counted or forgotten before."""
        producer = group.producer
        if producer and group.epoch >= self.epoch:
            count = self.closed.pop(producer, 0) + 1
            self.closed[producer] = count  # it is the last one now
            self.busy_since_s.pop(producer, None)
            excess = max(len(self.closed) - COUNTED_PRODUCERS, 0)
            others = (name for name in self.closed if name not in self.granted)
            for name in list(islice(others, excess)):
                del self.closed[name]

    def begin_epoch(self) -> None:
        """Retention has deleted groups that were not counted: no producer waits for them now."""
        self.epoch += 1
        self.granted = {producer: self.closed.get(producer, 0) for producer in self.granted}
        self.busy_since_s = {}

    def measure(self, tokens: int) -> None:
        """Note the cost of a group. Groups that came long ago weigh less in the mean, which is over
        about the last RECENT_GROUPS.
        """
        if self.measured >= RECENT_GROUPS:
            self.measured_tokens = self.measured_tokens * (RECENT_GROUPS - 1) // self.measured
            self.measured = RECENT_GROUPS - 1
        self.measured += 1
        self.measured_tokens += tokens


class BatcherState(msgspec.Struct):
    version: int = -1  # the newest announced version; -1: none yet
    next_batch: int = 0
    queues: dict[str, EnvQueue] = {}
    # tokens carried over by share: what it is owed of earlier batches
    deficit: dict[str, float] = {}
    short: dict[str, int] = {}  # tokens that the next batch lacks, by share
    clock: AwakeClock = msgspec.field(default_factory=AwakeClock)  # all waits are measured by it
    short_since_s: float = 0.0  # by the clock
    # Seconds of the clock that the next batch was short, by what it waited for. They are counted up
    # to `waited_until_s`.
    waited: dict[str, float] = {}
    waited_until_s: float = 0.0
    progress: CurriculumState = msgspec.field(default_factory=CurriculumState)


def fractions_at(config: BatcherConfig, state: BatcherState, batch: int) -> dict[str, float]:
    """The fraction of each env in a batch, by the rewards that are known now."""
    if config.curriculum.kind == "none":
        return config.fractions
    return fractions_of(config.curriculum, state.progress, batch)


def deficit_under(
    config: BatcherConfig, state: BatcherState, fractions: dict[str, float]
) -> dict[str, float]:
    """What each share is owed of earlier batches, under the fractions of the next batch."""
    if config.curriculum.kind == "none":
        return state.deficit
    return rebase_deficit(fractions, state.deficit)


def held_group(event: Event, group: ScoredGroup) -> HeldGroup:
    """What is held of a group that came with `event`. `group`: what of it fits into rows."""
    newest = int(group.newest_versions.max())
    first = first_of_rollout_mask(group.uids)
    return HeldGroup(
        event=event,
        tokens=group.total_tokens,
        rollouts=int(np.count_nonzero(first)),
        oldest=int(group.oldest_versions.min()),
        newest=newest,
        of_newest=int(np.count_nonzero(first & (group.oldest_versions == newest))),
        partition=group.partition,
        offsets=group.offsets[first].tolist(),
    )


def group_of(event: Event) -> JoinedGroup:
    assert isinstance(event.record, JoinedGroup)
    return event.record


def on_policy_rollouts(groups: Sequence[HeldGroup], version: int) -> int:
    """Rollouts that version `version` made alone."""
    return sum(held.of_newest for held in groups if held.newest == version)
