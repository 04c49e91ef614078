"""The journal of a processor: which records it took, in which order, at what time.

The state is rebuilt from it, and a run replayed.

A processor's journal is one partition of entries and, every so often, a snapshot. The slices of the
entries tile the inputs: each begins where the last of its partition ended, and its last offset is
always that of a record. So a missing record shows, and a reader knows when a slice is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from streamrl.stream.log.chunks import is_chunk
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.partitions_reader import SKIP_RECORDS, PartitionsReader
from streamrl.stream.log.protocol import (
    Event,
    Log,
    Message,
    TopicPartition,
    beginning_offset,
    end_offset,
)
from streamrl.stream.log.reading import read
from streamrl.stream.processor.join import RecordRef
from streamrl.stream.processor.joiner import Joiner
from streamrl.stream.processor.retention import end_offsets, first_offsets
from streamrl.stream.records import RECORDS, JournalEntry, Record, Slice
from streamrl.system.errors import InputGone

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
SCHEMAS = tuple(RECORDS)
TAIL = 8  # messages looked at first when the last record is sought


def record_slices(
    messages: Iterable[Message], offsets: dict[TopicPartition, int], slices: list[Slice]
) -> Iterator[Message]:
    """Pass the messages on, and append to `slices` in which order they were taken, run-length
    encoded. Moves `offsets` past them.
    """
    for tp, run in groupby(messages, attrgetter("topic", "partition")):
        topic, partition = tp
        count = 0
        end = 0
        for message in run:
            count += 1
            end = message.offset + 1
            yield message
        start = offsets.get(tp, 0)
        slices.append(Slice(topic=topic, partition=partition, start=start, end=end, count=count))
        offsets[tp] = end


def entries(log: Log, topic: str, start: int = 0) -> Iterator[tuple[int, Record]]:
    """(offset, record) of a journal, from offset `start` on. What is no record is skipped, with a
    warning.
    """
    for message in read(log, topic, 0, start):
        if is_chunk(message):
            continue  # the end of a record whose beginning retention has deleted
        record = to_event(message, SCHEMAS).record
        if isinstance(record, Record):
            yield message.offset, record
        else:
            cause = record.cause if record else "it is empty"
            logger.warning("%s@%d is skipped: %s", topic, message.offset, cause)


def last_record(log: Log, topic: str, kind: type[R]) -> R | None:
    """The last record of this kind in a journal, found from its end. None if there is none."""
    begin = beginning_offset(log, topic, 0)
    end = end_offset(log, topic, 0)
    tail = TAIL
    while end > 0:
        records = [
            record
            for _, record in entries(log, topic, max(begin, end - tail))
            if isinstance(record, kind)
        ]
        if records:
            return records[-1]
        if tail >= end:
            return None
        tail *= 8
    return None


@dataclass
class SliceReader:
    """Reads slices of inputs again, in the order asked. It reads each partition forwards only.
    With a `joiner` the messages come with the records that they refer to.
    """

    log: Log
    schemas_of: Callable[[str], tuple[str, ...]]  # of a topic
    joiner: Joiner | None = None
    records_read: int = 0

    def __post_init__(self) -> None:
        self._partitions = PartitionsReader(self.log)

    def read_slice(self, piece: Slice) -> list[Message]:
        """The messages of a slice, as they are in the log. Raises InputGone if any is missing."""
        messages = list(
            self._read_range((piece.topic, piece.partition), piece.start, piece.end - 1)
        )
        if len(messages) != piece.count:
            raise InputGone(
                f"{piece.topic}[{piece.partition}] {piece.start} to {piece.end} held "
                f"{piece.count} records, now {len(messages)}: "
                "retention or a user has removed them"
            )
        return messages if self.joiner is None else self.joiner.join(messages)

    def read_ahead(self, entries: Iterable[JournalEntry]) -> None:
        """Read the slices of these entries at once, as far as there is room."""
        starts: dict[TopicPartition, int] = {}
        ends: dict[TopicPartition, int] = {}
        for entry in entries:
            for piece in entry.slices:
                tp = piece.topic, piece.partition
                starts.setdefault(tp, piece.start)
                ends[tp] = piece.end
        self._partitions.read_ahead(starts, ends)

    def read_records(self, references: Collection[RecordRef]) -> dict[RecordRef, Event]:
        """Single records, wherever they are in the log. One that retention has deleted, or whose
        topic was deleted and made again, becomes an event without a record. So does one that refers
        to a record that retention has deleted.
        """
        events: dict[RecordRef, Event] = {}
        partitions = {(topic, partition) for topic, partition, _ in references}
        begin = first_offsets(self.log, partitions)
        end = end_offsets(self.log, partitions)
        existing: dict[TopicPartition, list[int]] = {tp: [] for tp in sorted(begin)}
        for topic, partition, offset in references:
            if not begin[topic, partition] <= offset < end[topic, partition]:
                events[topic, partition, offset] = Event(
                    topic=topic, partition=partition, offset=offset, key="", record=None
                )
            else:
                existing[topic, partition].append(offset)
        close = {tp: group for tp, group in existing.items() if is_close(group)}
        self._partitions.read_ahead(
            {tp: min(group) for tp, group in close.items()},
            {tp: max(group) + 1 for tp, group in close.items()},
        )
        for tp, wanted in existing.items():
            events |= self._read_offsets(tp, sorted(wanted))
        if missing := set(references) - events.keys():
            raise InputGone(
                f"{len(missing)} records that a snapshot refers to are gone, "
                f"the first {min(missing)}: a user has removed them"
            )
        return events

    def close(self) -> None:
        self._partitions.close()
        if self.joiner is not None:
            self.joiner.close()

    def _read_offsets(self, tp: TopicPartition, offsets: Sequence[int]) -> dict[RecordRef, Event]:
        """The records at these ascending offsets of one partition."""
        wanted = set(offsets)
        messages = [
            message
            for group in split_at_gaps(offsets)
            for message in self._read_range(tp, group[0], group[-1])
            if message.offset in wanted
        ]
        schemas = self.schemas_of(tp[0]) if offsets else ()
        if self.joiner is None:
            events = (to_event(message, schemas) for message in messages)
        else:
            events = self.joiner.events(messages)
        return {(*tp, event.offset): event for event in events}

    def _read_range(self, tp: TopicPartition, start: int, last: int) -> Iterator[Message]:
        """Messages with start <= offset <= last, where `last` is the offset of a message."""
        for message in self._partitions.read(tp, start, last):
            self.records_read += 1
            yield message


def is_close(offsets: Collection[int]) -> bool:
    """Whether the reader would move over none of these offsets."""
    return bool(offsets) and max(offsets) - min(offsets) <= SKIP_RECORDS


def split_at_gaps(offsets: Sequence[int]) -> Iterator[Sequence[int]]:
    """Ascending offsets, split where more than SKIP_RECORDS are between two of them."""
    if not offsets:
        return
    start = 0
    for i in range(1, len(offsets)):
        if offsets[i] - offsets[i - 1] > SKIP_RECORDS:
            yield offsets[start:i]
            start = i
    yield offsets[start:]
