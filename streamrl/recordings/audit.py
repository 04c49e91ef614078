"""PartitionKey every rollout of a run ended, from its topics alone: published = the sum of the fates + in
flight, exact, by env and policy version.

A fate belongs to one record of `rollouts.<env>`, by partition and offset. A record without one is
in flight if its part still holds it, or has not read it yet; otherwise it is lost. PartitionKey retention
has deleted the record or the fate, neither can be said: such rollouts are counted as gone, beside
the sum. Memory is a few bytes a rollout: tables by offset, no records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from streamrl.config import topology
from streamrl.learner.inputs import newest_lineages
from streamrl.log.codec import to_event
from streamrl.log.protocol import Event, Log, Message, beginning_offset, end_offset, read
from streamrl.processor.definition import Processor
from streamrl.processor.restore import restore
from streamrl.processor.snapshots import held_events
from streamrl.recordings.progress import OnProgress, no_progress
from streamrl.records import Batch, Fate, PolicyVersion, Rollout, ScoredGroup

KINDS = ("batched", "expired", "filtered", "duplicate", "failed", "invalid")
EVERY = 1_000  # records between two reports
NAMED = 20  # problems listed; all are counted

PartitionKey = tuple[str, int]  # env, partition


@dataclass
class Ledger:
    """What is known of each offset of one partition of rollouts."""

    start: int  # retention has deleted what lies below
    exists: np.ndarray  # (end,) bool
    versions: np.ndarray  # (end,) int32: policy version of the oldest token; -1 unreadable
    fates: np.ndarray  # (end,) uint8: how many fates point here
    kind: np.ndarray  # (end,) int8: index into KINDS of the last one; -1 none
    batch: np.ndarray  # (end,) int32: batched into; -1
    held: np.ndarray  # (end,) bool: a part still has it
    # (end,) bool: published before the oldest fate that retention has left, so its own may be
    # deleted
    early: np.ndarray

    @classmethod
    def empty(cls, start: int, end: int) -> Ledger:
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
    """The account of a run. `problems` names what does not balance; `unexplained` counts it."""

    counts: dict[tuple[str, int], Counter[str]] = field(
        default_factory=dict[tuple[str, int], Counter[str]]
    )  # (env, policy version) -> fate -> rollouts
    ages: Counter[int] = field(default_factory=Counter[int])  # age at training, in versions
    trained: int = 0  # batched, and the lead learner has announced the version
    batches: dict[int, int] = field(default_factory=dict[int, int])  # batch -> rollouts
    # version -> batch it was trained on
    trained_on: dict[int, int] = field(default_factory=dict[int, int])
    # batch -> version of the oldest token -> rollouts
    sampled_by: dict[int, Counter[int]] = field(default_factory=dict[int, Counter[int]])
    lineages: int = 0  # announcements of versions that were computed again with another result
    skipped: int = 0  # versions whose batch nothing was trained on
    lost: int = 0  # no fate, and nobody has it
    repeated: int = 0  # more than one fate
    dangling: int = 0  # fates that point at no record
    # retention has deleted the rollout, or the fate of one that nobody holds; not part of
    # `published`
    gone: int = 0
    problems: list[str] = field(default_factory=list[str])

    @property
    def published(self) -> int:
        return sum(self.total(name) for name in (*KINDS, "in flight", "lost"))

    @property
    def balanced(self) -> bool:
        return self.lost == self.repeated == self.dangling == 0

    def total(self, name: str) -> int:
        return sum(counts[name] for counts in self.counts.values())

    def add(self, problem: str) -> None:
        if len(self.problems) < NAMED:
            self.problems.append(problem)


@dataclass
class TopicReader:
    """Reads topics from end to end and reports the progress over all of them."""

    log: Log
    report: OnProgress
    bounds: dict[tuple[str, int], tuple[int, int]]  # (topic, partition) -> (start, end)
    done: int = 0  # offsets

    @classmethod
    def of(cls, log: Log, topics: list[str], report: OnProgress) -> TopicReader:
        reading = cls(log, report, {})
        reading.add(topics)
        return reading

    def add(self, topics: list[str]) -> None:
        """These too, as far as they go by now."""
        there = self.log.topics()
        self.bounds |= {
            (t, p): (beginning_offset(self.log, t, p), end_offset(self.log, t, p))
            for t in topics
            for p in range(there.get(t, 0))
        }

    @property
    def total(self) -> int:
        return sum(end - start for start, end in self.bounds.values())

    def events(self, topic: str, schemas: tuple[str, ...]) -> Iterator[Event]:
        return (to_event(message, schemas) for message in self.messages(topic))

    def messages(self, topic: str) -> Iterator[Message]:
        """All of one topic, partition by partition."""
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
    """Read the topics of a run and account for every rollout. `parts` are its buffer and batcher:
    what they hold is in flight.
    """
    rollouts = [topology.rollouts(env) for env in envs]
    reading = TopicReader.of(log, rollouts, progress)
    ledgers = {
        (t.partition(".")[2], p): Ledger.empty(start, end)
        for (t, p), (start, end) in reading.bounds.items()
        if t in rollouts
    }
    result = Audit()
    fates_from_s = oldest_s(log, topology.FATES)
    for message in chain.from_iterable(reading.messages(topic) for topic in rollouts):
        record = to_event(message, ("rollout",)).record
        ledger = ledgers[message.topic.partition(".")[2], message.partition]
        ledger.exists[message.offset] = True
        ledger.versions[message.offset] = (
            record.policy_version if isinstance(record, Rollout) else -1
        )
        ledger.early[message.offset] = message.timestamp_s < fates_from_s
    for part in parts:
        mark_held(log, ledgers, part)
    # only now: what was held, in a run that goes on, is held still or has its fate by then
    reading.add([topology.POLICY_VERSIONS, topology.FATES, topology.BATCHES])
    versions = [
        event.record for event in reading.events(topology.POLICY_VERSIONS, ("policy-version",))
    ]
    announced = {
        r.version: r.batch
        for r in versions
        if isinstance(r, PolicyVersion) and r.learner == learner
    }
    # of envs that were taken out of the run
    left_out = {topic for topic in log.topics() if topic.startswith("rollouts.")} - set(rollouts)
    for event in reading.events(topology.FATES, ("fate",)):
        if (
            isinstance(event.record, Fate)
            and topology.rollouts(event.record.environment) not in left_out
        ):
            record_fate(result, ledgers, event.record, log)
    for event in reading.events(topology.BATCHES, ("batch",)):
        if isinstance(event.record, Batch):
            result.batches[event.record.number] = len(set(event.record.uids))
    valid = newest_lineages(
        r for r in versions if isinstance(r, PolicyVersion) and r.learner == learner
    )
    result.lineages = sum(r.lineage for r in valid.values())
    result.skipped = sum(r.skipped for r in valid.values())
    # a fork has inherited others
    result.trained_on = {
        version: batch for version, batch in announced.items() if batch in result.batches
    }
    for where, ledger in ledgers.items():
        tally_partition(result, log, where, ledger, max(announced, default=-1))
    progress(reading.total, reading.total)
    return result


def oldest_s(log: Log, topic: str) -> float:
    """Time of the oldest record that retention has left of a topic, in seconds since the epoch;
    -inf where it has deleted none.
    """
    found = -math.inf
    for partition in range(log.topics().get(topic, 0)):
        if start := beginning_offset(log, topic, partition):
            first = next(read(log, topic, partition, start), None)
            found = max(found, math.inf if first is None else first.timestamp_s)
    return found


def record_fate(result: Audit, ledgers: dict[PartitionKey, Ledger], fate: Fate, log: Log) -> None:
    """Note a fate at each record it belongs to; those of rollouts that have come since the rollouts
    were read are not of this account.
    """
    ledger = ledgers.get((fate.environment, fate.partition))
    for index, offset in enumerate(fate.offsets.tolist()):
        if ledger is not None and len(ledger.exists) <= offset < end_offset(
            log, topology.rollouts(fate.environment), fate.partition
        ):
            continue
        if ledger is not None and 0 <= offset < ledger.start:
            result.gone += 1
            continue
        if ledger is None or offset >= len(ledger.exists) or not ledger.exists[offset]:
            result.dangling += 1
            result.add(
                f"fate {fate.fate} of {uid_of(fate, index)} points at"
                f" rollouts.{fate.environment}[{fate.partition}]@{offset}, where no rollout lies"
            )
            continue
        ledger.fates[offset] += 1
        ledger.kind[offset], ledger.batch[offset] = (
            KINDS.index(fate.fate),
            -1 if fate.batch is None else fate.batch,
        )
        if ledger.fates[offset] == 2:
            result.repeated += 1
            result.add(
                f"{uid_of(fate, index)} at rollouts.{fate.environment}[{fate.partition}]@{offset}"
                f" has a second fate: {fate.fate}"
            )


def mark_held(log: Log, ledgers: dict[PartitionKey, Ledger], part: Processor[Any, Any]) -> None:
    """Mark as in flight what a part holds and what it has not read yet."""
    fold, _ = restore(log, part)
    unread: Iterator[Event] = (
        event
        for topic, schemas in part.inputs.items()
        if topology.kind_of(topic) in topology.PARTITIONED
        for p in range(log.topics().get(topic, 0))
        if part.takes(topic, p)
        for event in events(
            log, topic, p, schemas, fold.offsets.get((topic, p), beginning_offset(log, topic, p))
        )
    )
    for event in chain(held_events(fold.state), unread):
        env = event.topic.partition(".")[2]
        if isinstance(event.record, ScoredGroup):
            held = ledgers[env, event.record.partition].held
            offsets = event.record.offsets
            # what has come since the rollouts were read is not of this account
            held[offsets[offsets < len(held)]] = True
        elif event.topic.startswith("rollouts.") and event.offset < len(
            ledgers[env, event.partition].held
        ):
            ledgers[env, event.partition].held[event.offset] = True


def tally_partition(
    result: Audit, log: Log, where: PartitionKey, ledger: Ledger, announced: int
) -> None:
    """Count the rollouts of one partition by fate, and name those that are lost."""
    env, partition = where
    without = ledger.exists & (ledger.fates == 0)
    gone = without & ~ledger.held & ledger.early
    lost = without & ~ledger.held & ~gone
    result.gone += int(gone.sum())
    states = {name: ledger.exists & (ledger.kind == i) for i, name in enumerate(KINDS)} | {
        "in flight": without & ledger.held,
        "lost": lost,
    }
    for name, mask in states.items():
        for version, count in zip(
            *np.unique(ledger.versions[mask], return_counts=True), strict=True
        ):
            result.counts.setdefault((env, int(version)), Counter())[name] += int(count)
    batched = states["batched"]
    result.ages.update((ledger.batch[batched] - ledger.versions[batched]).tolist())
    pairs, counts = np.unique(
        np.stack([ledger.batch[batched], ledger.versions[batched]]), axis=1, return_counts=True
    )
    for (batch, version), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
        result.sampled_by.setdefault(batch, Counter())[version] += count
    result.trained += int((batched & (ledger.batch < announced)).sum())
    result.lost += int(lost.sum())
    for offset in np.flatnonzero(lost)[:NAMED].tolist():
        event = next(
            events(log, topology.rollouts(env), partition, ("rollout",), offset, offset + 1), None
        )
        uid = (
            event.record.rollout_uid
            if event and isinstance(event.record, Rollout)
            else "an unreadable record"
        )
        result.add(
            f"{uid} at rollouts.{env}[{partition}]@{offset} has no fate, and no part holds it"
        )


def events(
    log: Log,
    topic: str,
    partition: int,
    schemas: tuple[str, ...],
    start: int | None = None,
    end: int | None = None,
) -> Iterator[Event]:
    for message in read(
        log,
        topic,
        partition,
        beginning_offset(log, topic, partition) if start is None else start,
        end,
    ):
        yield to_event(message, schemas)


def uid_of(fate: Fate, index: int) -> str:
    return fate.uids[index] if index < len(fate.uids) else "an unreadable rollout"
