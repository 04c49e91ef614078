"""Accounts for every rollout of a run, from its topics alone. By env and policy version, the number
of published rollouts must equal the sum of the fates and of the rollouts in flight.

A fate belongs to one record of `rollouts.<env>`, by partition and offset. A record without a fate
is in flight if a part holds it or has not read it yet, and otherwise it is lost. If retention may
have deleted the record or its fate, the rollout is counted as gone, and is not part of the sum.
The tables are indexed by offset and take a few bytes for each rollout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from streamrl.config import topology
from streamrl.learner.inputs import newest_lineages
from streamrl.log.codec import to_event
from streamrl.log.protocol import (
    Event,
    Log,
    Message,
    TopicPartition,
    beginning_offset,
    end_offset,
    read,
)
from streamrl.processor.definition import Processor
from streamrl.processor.restore import restore
from streamrl.processor.snapshots import held_events
from streamrl.recordings.progress import OnProgress, no_progress
from streamrl.records import Batch, Fate, PolicyVersion, Rollout, ScoredGroup

KINDS = ("batched", "expired", "filtered", "duplicate", "failed", "invalid")
EVERY = 1_000  # records between two reports of progress
NAMED = 20  # the problems that are listed, while all are counted

PartitionKey = tuple[str, int]  # env, partition


@dataclass
class PartitionAccount:
    """What is known of the rollouts in one partition. The arrays are indexed by offset."""

    start: int  # the first offset that retention has not deleted
    exists: np.ndarray  # (end,) bool: whether a record lies there
    versions: np.ndarray  # (end,) int32: policy version of the oldest token; -1 if unreadable
    fates: np.ndarray  # (end,) uint8: number of fates that point there
    kind: np.ndarray  # (end,) int8: index of the last fate in KINDS; -1 if there is none
    batch: np.ndarray  # (end,) int32: number of the batch that has it; -1 if there is none
    held: np.ndarray  # (end,) bool: whether a part holds it or has not read it yet
    # (end,) bool: whether it is older than the oldest fate that retention has left, so that its own
    # fate may be deleted
    early: np.ndarray

    @classmethod
    def empty(cls, start: int, end: int) -> PartitionAccount:
        """A ledger of the offsets below `end`, without any rollout."""
        return cls(
            start,
            np.zeros(end, bool),
            np.full(end, -1, np.int32),
            np.zeros(end, np.uint8),
            np.full(end, -1, np.int8),
            np.full(end, -1, np.int32),
            np.zeros(end, bool),
            np.zeros(end, bool),
        )


@dataclass
class Audit:
    """The account of a run."""

    # (env, policy version) -> fate -> rollouts
    counts: dict[tuple[str, int], Counter[str]] = field(
        default_factory=dict[tuple[str, int], Counter[str]]
    )
    ages: Counter[int] = field(default_factory=Counter[int])  # age at training in versions
    trained: int = 0  # batched rollouts on which the lead learner has announced a version
    batches: dict[int, int] = field(default_factory=dict[int, int])  # batch -> rollouts
    # version -> batch it was trained on
    trained_on: dict[int, int] = field(default_factory=dict[int, int])
    # batch -> version of the oldest token -> rollouts
    sampled_by: dict[int, Counter[int]] = field(default_factory=dict[int, Counter[int]])
    lineages: int = 0  # announcements of versions that were computed again with another result
    skipped: int = 0  # versions whose batch could not be trained on
    lost: int = 0  # rollouts that have no fate and that no part holds
    repeated: int = 0  # rollouts with more than one fate
    dangling: int = 0  # fates that point at no record
    # Rollouts that retention has deleted, or whose fate it may have deleted. They are not part of
    # `published`.
    gone: int = 0
    problems: list[str] = field(default_factory=list[str])  # what does not balance, in words

    @property
    def published(self) -> int:
        """The number of rollouts that are accounted for."""
        return sum(self.total(name) for name in (*KINDS, "in flight", "lost"))

    @property
    def balanced(self) -> bool:
        """Whether every rollout has exactly one fate or is in flight."""
        return self.lost == self.repeated == self.dangling == 0

    def total(self, name: str) -> int:
        """The rollouts of all envs and versions with the fate `name`, or "in flight" or "lost"."""
        return sum(counts[name] for counts in self.counts.values())

    def add(self, problem: str) -> None:
        """Add a problem to the list, unless it is full."""
        if len(self.problems) < NAMED:
            self.problems.append(problem)


@dataclass
class TopicReader:
    """Reads topics from start to end and reports the progress over all of them."""

    log: Log
    report: OnProgress
    bounds: dict[tuple[str, int], tuple[int, int]]  # (topic, partition) -> (start, end)
    done: int = 0  # the offsets of the partitions that were read to their ends

    @classmethod
    def of(cls, log: Log, topics: list[str], report: OnProgress) -> TopicReader:
        reading = cls(log, report, {})
        reading.add(topics)
        return reading

    def add(self, topics: list[str]) -> None:
        """Read these topics too, up to their current ends."""
        counts = self.log.topics()
        for topic in topics:
            for partition in range(counts.get(topic, 0)):
                start = beginning_offset(self.log, topic, partition)
                end = end_offset(self.log, topic, partition)
                self.bounds[topic, partition] = (start, end)

    @property
    def total(self) -> int:
        """The number of offsets to read."""
        return sum(end - start for start, end in self.bounds.values())

    def events(self, topic: str, schemas: tuple[str, ...]) -> Iterator[Event]:
        """The events of one topic, partition by partition."""
        return (to_event(message, schemas) for message in self.messages(topic))

    def messages(self, topic: str) -> Iterator[Message]:
        """The messages of one topic, partition by partition."""
        for (name, partition), (start, end) in self.bounds.items():
            if name != topic:
                continue
            for index, message in enumerate(read(self.log, topic, partition, start, end)):
                if index % EVERY == 0:
                    self.report(self.done + message.offset - start, self.total)
                yield message
            self.done += end - start


def audit(
    log: Log,
    envs: list[str],
    learner: str,
    parts: list[Processor[Any, Any]],
    progress: OnProgress = no_progress,
) -> Audit:
    """Read the topics of a run and account for every rollout.

    `parts` are its buffer and batcher. The rollouts that they hold are in flight.
    """
    rollouts = [topology.rollouts(env) for env in envs]
    reading = TopicReader.of(log, rollouts, progress)
    ledgers = read_rollouts(log, reading, rollouts)
    for part in parts:
        mark_held(log, ledgers, part)
    # The run may go on meanwhile. What the parts no longer hold by now has a fate, so fates are
    # read after their states.
    reading.add([topology.POLICY_VERSIONS, topology.FATES, topology.BATCHES])
    result = Audit()
    newest = read_training(result, reading, learner)
    # Fates of envs that were removed from the run are not counted.
    removed = {t for t in log.topics() if topology.kind_of(t) == topology.ROLLOUTS} - set(rollouts)
    for event in reading.events(topology.FATES, ("fate",)):
        fate = event.record
        if isinstance(fate, Fate) and topology.rollouts(fate.environment) not in removed:
            record_fate(result, ledgers, fate, log)
    for where, ledger in ledgers.items():
        tally_partition(result, log, where, ledger, newest)
    progress(reading.total, reading.total)
    return result


def read_training(result: Audit, reading: TopicReader, learner: str) -> int:
    """Add the batches, and the versions that the lead learner was trained to.

    Returns the newest announced version, -1 if there is none.
    """
    versions = [
        event.record
        for event in reading.events(topology.POLICY_VERSIONS, ("policy-version",))
        if isinstance(event.record, PolicyVersion) and event.record.learner == learner
    ]
    valid = newest_lineages(versions)
    result.lineages = sum(record.lineage for record in valid.values())
    result.skipped = sum(record.skipped for record in valid.values())
    for event in reading.events(topology.BATCHES, ("batch",)):
        if isinstance(event.record, Batch):
            result.batches[event.record.number] = len(set(event.record.uids))
    # A fork announces versions of its parent, whose batches are not in its own topic.
    for record in versions:
        if record.batch in result.batches:
            result.trained_on[record.version] = record.batch
    return max((record.version for record in versions), default=-1)


def read_rollouts(
    log: Log, reading: TopicReader, topics: list[str]
) -> dict[PartitionKey, PartitionAccount]:
    """A ledger for each partition of the topics, with the rollouts that lie there."""
    ledgers = {
        (topology.subject_of(topic), partition): PartitionAccount.empty(start, end)
        for (topic, partition), (start, end) in reading.bounds.items()
        if topic in topics
    }
    fates_from_s = oldest_s(log, topology.FATES)
    for message in chain.from_iterable(reading.messages(topic) for topic in topics):
        ledger = ledgers[topology.subject_of(message.topic), message.partition]
        ledger.exists[message.offset] = True
        record = to_event(message, ("rollout",)).record
        if isinstance(record, Rollout):
            ledger.versions[message.offset] = record.policy_version
        ledger.early[message.offset] = message.timestamp_s < fates_from_s
    return ledgers


def oldest_s(log: Log, topic: str) -> float:
    """The time in seconds since the epoch before which retention may have deleted records.

    It is -inf for a topic from which retention has deleted nothing.
    """
    found = -math.inf
    for partition in range(log.topics().get(topic, 0)):
        start = beginning_offset(log, topic, partition)
        if start:
            first = next(read(log, topic, partition, start), None)
            found = max(found, math.inf if first is None else first.timestamp_s)
    return found


def record_fate(
    result: Audit, ledgers: dict[PartitionKey, PartitionAccount], fate: Fate, log: Log
) -> None:
    """Add a fate to each rollout that it belongs to.

    Rollouts published after the ledgers were made are not part of the account.
    """
    topic = topology.rollouts(fate.environment)
    ledger = ledgers.get((fate.environment, fate.partition))
    for index, offset in enumerate(fate.offsets.tolist()):
        uid = fate.uids[index] if index < len(fate.uids) else "an unreadable rollout"
        place = f"{topic}[{fate.partition}]@{offset}"
        if ledger is not None:
            end = len(ledger.exists)
            if end <= offset < end_offset(log, topic, fate.partition):
                continue
            if 0 <= offset < ledger.start:
                result.gone += 1
                continue
        if ledger is None or offset >= len(ledger.exists) or not ledger.exists[offset]:
            result.dangling += 1
            result.add(f"fate {fate.fate} of {uid} points at {place}, where no rollout lies")
            continue
        ledger.fates[offset] += 1
        ledger.kind[offset] = KINDS.index(fate.fate)
        ledger.batch[offset] = -1 if fate.batch is None else fate.batch
        if ledger.fates[offset] == 2:
            result.repeated += 1
            result.add(f"{uid} at {place} has a second fate: {fate.fate}")


def mark_held(
    log: Log, ledgers: dict[PartitionKey, PartitionAccount], part: Processor[Any, Any]
) -> None:
    """Mark the rollouts that a part holds or has not read yet.

    Rollouts published after the ledgers were made are not part of the account.
    """
    current, _ = restore(log, part)
    for event in chain(held_events(current.state), unread_events(log, part, current.offsets)):
        env = topology.subject_of(event.topic)
        if isinstance(event.record, ScoredGroup):
            held = ledgers[env, event.record.partition].held
            offsets = event.record.offsets
            held[offsets[offsets < len(held)]] = True
        elif topology.kind_of(event.topic) == topology.ROLLOUTS:
            held = ledgers[env, event.partition].held
            if event.offset < len(held):
                held[event.offset] = True


def unread_events(
    log: Log, part: Processor[Any, Any], offsets: Mapping[TopicPartition, int]
) -> Iterator[Event]:
    """The rollouts and groups that a part has not read yet. `offsets` are those it reads next."""
    for topic, schemas in part.inputs.items():
        if topology.kind_of(topic) not in topology.PARTITIONED:
            continue
        for partition in range(log.topics().get(topic, 0)):
            if not part.takes(topic, partition):
                continue
            start = offsets.get((topic, partition), beginning_offset(log, topic, partition))
            for message in read(log, topic, partition, start):
                yield to_event(message, schemas)


def tally_partition(
    result: Audit, log: Log, where: PartitionKey, ledger: PartitionAccount, announced: int
) -> None:
    """Count the rollouts of one partition by fate, and name those that are lost.

    `announced` is the newest version of the lead learner, -1 if there is none.
    """
    env, partition = where
    without_fate = ledger.exists & (ledger.fates == 0)
    gone = without_fate & ~ledger.held & ledger.early
    lost = without_fate & ~ledger.held & ~gone
    result.gone += int(gone.sum())
    result.lost += int(lost.sum())
    states = {name: ledger.exists & (ledger.kind == i) for i, name in enumerate(KINDS)}
    states["in flight"] = without_fate & ledger.held
    states["lost"] = lost
    for name, mask in states.items():
        versions, counts = np.unique(ledger.versions[mask], return_counts=True)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
            result.counts.setdefault((env, version), Counter())[name] += count
    batched = states["batched"]
    batches = ledger.batch[batched]
    sampled_by = ledger.versions[batched]
    result.ages.update((batches - sampled_by).tolist())
    result.trained += int((batches < announced).sum())
    pairs, counts = np.unique(np.stack([batches, sampled_by]), axis=1, return_counts=True)
    for (batch, version), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
        result.sampled_by.setdefault(batch, Counter())[version] += count
    topic = topology.rollouts(env)
    for offset in np.flatnonzero(lost)[:NAMED].tolist():
        message = next(read(log, topic, partition, offset, offset + 1), None)
        record = None if message is None else to_event(message, ("rollout",)).record
        uid = record.rollout_uid if isinstance(record, Rollout) else "an unreadable record"
        result.add(f"{uid} at {topic}[{partition}]@{offset} has no fate, and no part holds it")
