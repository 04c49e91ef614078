"""What retention has deleted, of what a processor holds or is still to read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Offsets, TopicPartition
from streamrl.stream.log.reading import read_partitions
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.join import RecordRef
from streamrl.stream.processor.snapshots import held_events
from streamrl.stream.records import JournalEntry, Record

NOTHING_LEFT = 2**63 - 1


def first_offsets(log: Log, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The first offset that each partition still has. For a topic that does not exist any more:
    NOTHING_LEFT.
    """
    existing = log.topics()
    begin = log.beginning_offsets([tp for tp in partitions if tp[0] in existing])
    return {tp: begin.get(tp, NOTHING_LEFT) for tp in partitions}


def end_offsets(log: Log, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The last stable offset of each partition, 0 for a topic that does not exist any more."""
    existing = log.topics()
    end = log.end_offsets([tp for tp in partitions if tp[0] in existing])
    return {tp: end.get(tp, 0) for tp in partitions}


def is_gone(start: int, begin: int) -> bool:
    """Whether retention has deleted records from `start` on. `begin`: the first offset left.

    A single missing offset does not count: it may be that of a transaction marker.
    """
    return start < begin - 1


def deleted_inputs(
    log: Log, processor: Processor[Any, Any], entries: Iterable[JournalEntry]
) -> list[str]:
    """The partitions of which inputs of these entries are not there any more, in words: retention
    has deleted them or what they refer to, or their topic was deleted and made again. Asked before
    the entries are replayed, so that a replay does not end half-way.
    """
    starts: dict[TopicPartition, int] = {}
    ends: dict[TopicPartition, int] = {}
    for entry in entries:
        for piece in entry.slices:
            tp = piece.topic, piece.partition
            starts.setdefault(tp, piece.start)
            ends[tp] = piece.end
    begin = first_offsets(log, starts)
    end = end_offsets(log, starts)
    begin |= first_joinable(log, processor, begin, starts, ends)
    return sorted(
        f"{topic}[{partition}] from offset {start}"
        for (topic, partition), start in starts.items()
        if is_gone(start, begin[topic, partition]) or ends[topic, partition] > end[topic, partition]
    )


def first_joinable(
    log: Log,
    processor: Processor[Any, Any],
    begin: Offsets,
    starts: Offsets,
    ends: Offsets,
) -> dict[TopicPartition, int]:
    """The first offsets of the partitions that have records between `starts` and `ends` which refer
    to records that retention has deleted: no such record is left from there on.

    `begin`: the first offsets of the partitions.
    """
    join = processor.join
    if join is None:
        return {}
    counts = log.topics()
    referred = {(topic, p) for topic in join.topics for p in range(counts.get(topic, 0))}
    first_left = first_offsets(log, referred)
    ends_now = end_offsets(log, referred)
    if not any(first_left.values()) and join.topics <= counts.keys():
        return {}
    first = dict[TopicPartition, int]()
    from_offsets = {tp: max(start, begin[tp]) for tp, start in starts.items()}
    for message in read_partitions(log, from_offsets, ends):
        record = to_event(message, processor.schemas_of(message.topic)).record
        places = join.references(record) if isinstance(record, Record) else ()
        # Of an env that was taken out of the run they are in a topic that `join` does not name.
        unknown = {(topic, partition) for topic, partition, _ in places} - first_left.keys()
        first_left |= first_offsets(log, unknown)
        ends_now |= end_offsets(log, unknown)
        if any(not first_left[at[:2]] <= at[2] < ends_now[at[:2]] for at in places):
            # `is_gone` allows for a single offset that is no record.
            tp = message.topic, message.partition
            first[tp] = max(first.get(tp, 0), message.offset + 2)
    return first


def held_but_deleted(
    log: Log, processor: Processor[Any, Any], current: ProcessorState[Any, Any]
) -> list[str]:
    """A warning if the state holds records that retention has deleted, or that refer to such: the
    processor still has them, but no restart can read them again.
    """
    held = set[RecordRef]()
    for event in held_events(current.state):
        held.add((event.topic, event.partition, event.offset))
        if processor.join is not None and isinstance(event.record, Record):
            held.update(processor.join.references(event.record))
    begin = first_offsets(log, {(topic, partition) for topic, partition, _ in held})
    gone = {topic for topic, partition, offset in held if offset < begin[topic, partition]}
    if not gone:
        return []
    return [
        f"holds records of {', '.join(sorted(gone))} that retention has deleted; "
        "a restart could not have them: lengthen topics.retention_hours"
    ]


def listed(names: Sequence[str]) -> str:
    """The first few of these names, in one line."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
