"""What retention has deleted, of what a processor holds or is still to read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from streamrl.stream.log.protocol import Log, TopicPartition
from streamrl.stream.processor.definition import ProcessorState
from streamrl.stream.processor.snapshots import held_events
from streamrl.stream.records import JournalEntry

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


def deleted_inputs(log: Log, entries: Iterable[JournalEntry]) -> list[str]:
    """The partitions of which inputs of these entries are not there any more, in words: retention
    has deleted them, or their topic was deleted and made again. Asked before the entries are
    replayed, so that a replay does not end half-way.
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
    return sorted(
        f"{topic}[{partition}] from offset {start}"
        for (topic, partition), start in starts.items()
        if is_gone(start, begin[topic, partition]) or ends[topic, partition] > end[topic, partition]
    )


def held_but_deleted(log: Log, current: ProcessorState[Any, Any]) -> list[str]:
    """A warning if the state holds records that retention has deleted: the processor still has
    them, but no restart can read them again.
    """
    held = {(event.topic, event.partition, event.offset) for event in held_events(current.state)}
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
