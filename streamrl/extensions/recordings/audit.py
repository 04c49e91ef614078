"""Accounts for every rollout of a run, from its topics alone. By env and policy version, the number
of published rollouts must equal the sum of the fates and of the rollouts in flight.

A fate belongs to one record of its env's topic of rollouts, by partition and offset. A record
without a fate is in flight if a part holds it or has not read it yet, and otherwise it is lost. If
retention may have deleted the record or its fate, the rollout is counted as gone, and is not part
of the sum.
The tables are indexed by offset and take a few bytes for each rollout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.progress import OnProgress, no_progress
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import (
    Event,
    Log,
    Message,
    Offsets,
    TopicPartition,
    beginning_offset,
    partitions_of,
)
from streamrl.stream.log.reading import read, read_partitions
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.journal import entries
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import held_events
from streamrl.stream.records import Batch, Fate, JournalEntry, PolicyVersion, Rollout, ScoredGroup
from streamrl.weights.announcements import newest_lineages

KINDS = ("batched", "expired", "filtered", "duplicate", "failed", "invalid")
EVERY = 1_000  # records between two reports of progress
NAMED = 20  # the problems that are listed, while all are counted


@dataclass
class PartitionLedger:
    """What is known of the rollouts in one partition. The arrays are indexed by offset."""

    start: int  # the first offset that retention has not deleted
    envs: np.ndarray  # (end,) int32: index into Auditor.envs
    exists: np.ndarray  # (end,) bool: whether a record is there
    versions: np.ndarray  # (end,) int32: policy version of the oldest token; -1 if unreadable
    fates: np.ndarray  # (end,) uint8: number of fates that point there
    kind: np.ndarray  # (end,) int8: index of the last fate in KINDS; -1 if there is none
    tokens: np.ndarray  # (end,) int32: that were sampled; 0 if unreadable
    batch: np.ndarray  # (end,) int32: number of the batch that has it; -1 if there is none
    held: np.ndarray  # (end,) bool: whether a part holds it or has not read it yet
    # (end,) bool: whether it is older than the oldest fate that retention has left, so that its own
    # fate may be deleted; or than the last time that the batcher continued without groups that
    # retention had deleted, so that its group may be one of them
    early: np.ndarray

    @classmethod
    def empty(cls, start: int, end: int) -> PartitionLedger:
        """A ledger of the offsets below `end`, without any rollout."""
        return cls(
            start,
            np.zeros(end, np.int32),
            np.zeros(end, bool),
            np.full(end, -1, np.int32),
            np.zeros(end, np.uint8),
            np.full(end, -1, np.int8),
            np.zeros(end, np.int32),
            np.full(end, -1, np.int32),
            np.zeros(end, bool),
            np.zeros(end, bool),
        )


@dataclass
class Audit:
    """What an audit has counted."""

    # (env, policy version) -> fate -> rollouts
    counts: dict[tuple[str, int], Counter[str]] = field(
        default_factory=dict[tuple[str, int], Counter[str]]
    )
    # env -> fate -> sampled tokens
    tokens: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
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

    def total_tokens(self, name: str) -> int:
        """The sampled tokens of all rollouts with the fate `name`, or "in flight" or "lost"."""
        return sum(tokens[name] for tokens in self.tokens.values())

    def add_problem(self, problem: str) -> None:
        """Add a problem to the list, unless it is full."""
        if len(self.problems) < NAMED:
            self.problems.append(problem)


@dataclass
class TopicReader:
    """Reads topics from start to end and reports the progress over all of them."""

    log: Log
    report: OnProgress
    bounds: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict[Any, Any])
    done: int = 0  # the offsets of the partitions that were read to their ends

    def add(self, topics: list[str]) -> None:
        """Read these topics too, up to their current ends."""
        counts = self.log.topics()
        partitions = [(topic, part) for topic in topics for part in range(counts.get(topic, 0))]
        begins = self.log.beginning_offsets(partitions)
        ends = self.log.end_offsets(partitions)
        self.bounds |= {tp: (begins[tp], ends[tp]) for tp in partitions}

    @property
    def total(self) -> int:
        """The number of offsets to read."""
        return sum(end - start for start, end in self.bounds.values())

    def events(self, topic: str, schemas: tuple[str, ...]) -> Iterator[Event]:
        """The events of a topic that has one partition."""
        return (to_event(message, schemas) for message in self.messages([topic]))

    def messages(self, topics: Collection[str]) -> Iterator[Message]:
        """The messages of these topics, in the order of each partition."""
        wanted = frozenset(topics)
        starts = {tp: start for tp, (start, _) in self.bounds.items() if tp[0] in wanted}
        ends = {tp: self.bounds[tp][1] for tp in starts}
        for index, message in enumerate(read_partitions(self.log, starts, ends)):
            if index % EVERY == 0:
                self.report(self.done + index, self.total)
            yield message
        self.done += sum(ends[tp] - start for tp, start in starts.items())


def audit(log: Log, run: RunFile, progress: OnProgress = no_progress) -> Audit:
    """Read the topics of a run and account for every rollout."""
    auditor = Auditor(log, run, progress)
    auditor.read_rollouts()
    for processor in processors_of(run).values():
        auditor.mark_held(processor)
    # The run may continue meanwhile. What the processors no longer hold by now has a fate, so fates
    # are read after their states.
    auditor.reader.add([topology.POLICY_VERSIONS, topology.FATES, topology.BATCHES])
    auditor.read_training()
    auditor.read_fates()
    auditor.tally()
    progress(auditor.reader.total, auditor.reader.total)
    return auditor.result


class Auditor:
    """Makes a ledger of each partition of rollouts, enters what the other topics contain about
    them, and counts.

    Rollouts published after the ledgers were made are not part of the audit.
    """

    def __init__(self, log: Log, run: RunFile, progress: OnProgress = no_progress) -> None:
        self.log = log
        self.run = run
        self.learner = run.learner.name  # the lead learner
        self.topics = [topology.rollouts(family) for family in topology.families(run.envs)]
        self.reader = TopicReader(log, progress)
        self.reader.add(self.topics)
        self.ledgers: dict[TopicPartition, PartitionLedger] = {
            tp: PartitionLedger.empty(start, end) for tp, (start, end) in self.reader.bounds.items()
        }
        self.envs = {env: index for index, env in enumerate(run.envs)}
        self.newest_version = -1  # of the lead learner; -1 if there is none
        self.result = Audit(tokens={env: Counter() for env in run.envs})

    # ---- ledgers -----------------------------------------------------------------------------

    def read_rollouts(self) -> None:
        """Enter the rollouts of each partition."""
        fates_from_s = oldest_s(self.log, topology.FATES)
        cut_s = groups_cut_s(self.log)
        for message in self.reader.messages(self.topics):
            ledger = self.ledgers[message.topic, message.partition]
            ledger.exists[message.offset] = True
            record = to_event(message, ("rollout",)).record
            named = record.environment if isinstance(record, Rollout) else ""
            env = topology.env_of(message.topic, named, self.run.envs)
            ledger.envs[message.offset] = self.envs.setdefault(env, len(self.envs))
            if isinstance(record, Rollout):
                ledger.versions[message.offset] = record.policy_version
                ledger.tokens[message.offset] = record.sampled_tokens
            gone_before_s = max(fates_from_s, cut_s.get(message.topic, -math.inf))
            ledger.early[message.offset] = message.timestamp_s < gone_before_s

    def mark_held(self, processor: Processor[Any, Any]) -> None:
        """Mark the rollouts that a processor holds or has not read yet."""
        current, _ = restore(self.log, processor)
        unread = unread_events(self.log, processor, current.offsets)
        for event in chain(held_events(current.state), unread):
            if isinstance(event.record, ScoredGroup):
                topic = topology.rollouts(topology.subject_of(event.topic))
                held = self.ledgers[topic, event.record.partition].held
                offsets = event.record.offsets
                held[offsets[offsets < len(held)]] = True
            elif topology.kind_of(event.topic) == topology.ROLLOUTS:
                held = self.ledgers[event.topic, event.partition].held
                if event.offset < len(held):
                    held[event.offset] = True

    def read_fates(self) -> None:
        """Enter the fates. Those of envs that were removed from the run are not counted."""
        rollouts = {t for t in self.log.topics() if topology.kind_of(t) == topology.ROLLOUTS}
        removed = rollouts - set(self.topics)
        # Some of the fates may be of rollouts that were published since the ledgers were made.
        ends = self.log.end_offsets(list(self.reader.bounds))
        for event in self.reader.events(topology.FATES, ("fate",)):
            fate = event.record
            if isinstance(fate, Fate) and topology.rollouts(fate.environment) not in removed:
                self._enter_fate(fate, ends)

    def _enter_fate(self, fate: Fate, ends: Offsets) -> None:
        """Enter a fate for each rollout that it belongs to."""
        topic = topology.rollouts(fate.environment)
        ledger = self.ledgers.get((topic, fate.partition))
        for index, offset in enumerate(fate.offsets.tolist()):
            uid = fate.uids[index] if index < len(fate.uids) else "an unreadable rollout"
            place = f"{topic}[{fate.partition}]@{offset}"
            if ledger is not None:
                end = len(ledger.exists)
                if end <= offset < ends[topic, fate.partition]:
                    continue
                if 0 <= offset < ledger.start:
                    self.result.gone += 1
                    continue
            if ledger is None or offset >= len(ledger.exists) or not ledger.exists[offset]:
                self.result.dangling += 1
                self.result.add_problem(
                    f"fate {fate.fate} of {uid} points at {place}, where no rollout is"
                )
                continue
            ledger.fates[offset] += 1
            ledger.kind[offset] = KINDS.index(fate.fate)
            ledger.batch[offset] = -1 if fate.batch is None else fate.batch
            if ledger.fates[offset] == 2:
                self.result.repeated += 1
                self.result.add_problem(f"{uid} at {place} has a second fate: {fate.fate}")

    # ---- counts ------------------------------------------------------------------------------

    def read_training(self) -> None:
        """Count the batches, and the versions that the lead learner was trained to."""
        result = self.result
        versions = [
            event.record
            for event in self.reader.events(topology.POLICY_VERSIONS, ("policy-version",))
            if isinstance(event.record, PolicyVersion) and event.record.learner == self.learner
        ]
        valid = newest_lineages(versions)
        result.lineages = sum(record.lineage for record in valid.values())
        result.skipped = sum(record.skipped for record in valid.values())
        for event in self.reader.events(topology.BATCHES, ("batch",)):
            if isinstance(event.record, Batch):
                result.batches[event.record.number] = len(set(event.record.uids))
        # A fork announces versions of its parent, whose batches are not in its own topic.
        for record in versions:
            if record.batch in result.batches:
                result.trained_on[record.version] = record.batch
        self.newest_version = max((record.version for record in versions), default=-1)

    def tally(self) -> None:
        """Count the rollouts by fate, and name those that are lost."""
        for (topic, partition), ledger in self.ledgers.items():
            self._tally_partition(topic, partition, ledger)

    def _tally_partition(self, topic: str, partition: int, ledger: PartitionLedger) -> None:
        result = self.result
        envs = list(self.envs)
        without_fate = ledger.exists & (ledger.fates == 0)
        gone = without_fate & ~ledger.held & ledger.early
        lost = without_fate & ~ledger.held & ~gone
        result.gone += int(gone.sum())
        result.lost += int(lost.sum())
        states = {name: ledger.exists & (ledger.kind == i) for i, name in enumerate(KINDS)}
        states["in flight"] = without_fate & ledger.held
        states["lost"] = lost
        for name, mask in states.items():
            tokens = np.bincount(ledger.envs[mask], weights=ledger.tokens[mask])
            for env in np.flatnonzero(tokens).tolist():
                result.tokens.setdefault(envs[env], Counter())[name] += int(tokens[env])
            pairs, counts = distinct_pairs(ledger.envs[mask], ledger.versions[mask])
            for (env, version), count in zip(pairs, counts, strict=True):
                result.counts.setdefault((envs[env], version), Counter())[name] += count
        batched = states["batched"]
        batches = ledger.batch[batched]
        sampled_by = ledger.versions[batched]
        result.ages.update((batches - sampled_by).tolist())
        result.trained += int((batches < self.newest_version).sum())
        pairs, counts = distinct_pairs(batches, sampled_by)
        for (batch, version), count in zip(pairs, counts, strict=True):
            result.sampled_by.setdefault(batch, Counter())[version] += count
        for offset in np.flatnonzero(lost)[:NAMED].tolist():
            message = next(read(self.log, topic, partition, offset, offset + 1), None)
            record = None if message is None else to_event(message, ("rollout",)).record
            uid = record.rollout_uid if isinstance(record, Rollout) else "an unreadable record"
            result.add_problem(
                f"{uid} at {topic}[{partition}]@{offset} has no fate, and no part holds it"
            )


def distinct_pairs(
    first: np.ndarray, second: np.ndarray
) -> tuple[list[tuple[int, int]], list[int]]:
    """The distinct pairs of elements at the same index, and how often each occurs."""
    pairs, counts = np.unique(np.stack([first, second]), axis=1, return_counts=True)
    return [(one, other) for one, other in pairs.T.tolist()], counts.tolist()


def oldest_s(log: Log, topic: str) -> float:
    """The time in seconds since the epoch before which retention may have deleted records.

    It is -inf for a topic from which retention has deleted nothing.
    """
    oldest = -math.inf
    for partition in range(log.topics().get(topic, 0)):
        start = beginning_offset(log, topic, partition)
        if start:
            first = next(read(log, topic, partition, start), None)
            oldest = max(oldest, math.inf if first is None else first.timestamp_s)
    return oldest


def groups_cut_s(log: Log) -> dict[str, float]:
    """The last time, by topic of rollouts, at which the batcher continued without groups of theirs
    that retention had deleted, in seconds since the epoch.
    """
    cut_s = dict[str, float]()
    groups = [topic for topic in log.topics() if topology.kind_of(topic) == topology.GROUPS]
    if not any(log.beginning_offsets(partitions_of(log, groups)).values()):
        return cut_s
    for _, entry in entries(log, topology.journal(topology.BATCHER.name)):
        if not isinstance(entry, JournalEntry):
            continue
        for topic, _, _ in entry.removed or ():
            if topic in groups:
                cut_s[topology.rollouts(topology.subject_of(topic))] = entry.time_s
    return cut_s


def unread_events(log: Log, processor: Processor[Any, Any], offsets: Offsets) -> Iterator[Event]:
    """The rollouts and groups that a processor has not read yet. `offsets` are those it reads
    next.
    """
    partitions = [
        tp
        for tp in processor.existing_partitions(log)
        if topology.kind_of(tp[0]) in topology.PARTITIONED
    ]
    begins = log.beginning_offsets(partitions)
    starts = {tp: offsets.get(tp, begin) for tp, begin in begins.items()}
    for message in read_partitions(log, starts, log.end_offsets(partitions)):
        yield to_event(message, processor.inputs[message.topic])
