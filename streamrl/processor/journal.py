"""The journal of a part: which records it took, in which order, at what time. From it the part's
state is rebuilt, and a run replayed.

One partition per part holds entries and, every so often, a snapshot. Slices tile: each starts where
the last of its partition ended, and its last offset is always that of a record, so a hole shows and
a reader knows when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from streamrl.errors import InputGone
from streamrl.log.chunks import is_chunk
from streamrl.log.codec import decode, to_event
from streamrl.log.protocol import (
    BoundedReader,
    Event,
    Log,
    Message,
    Reader,
    TopicPartition,
    beginning_offset,
    end_offset,
    read,
)
from streamrl.processor.snapshots import RecordRef
from streamrl.records import Record, Slice

R = TypeVar("R", bound=Record)
TAIL = 8  # messages looked at first when the last entry is sought
NOTHING_LEFT = 2**63 - 1
# between two records wanted: rather than read so many for nothing, begin anew behind them
SKIP_RECORDS = 2_000


def record_slices(
    messages: Iterable[Message], positions: dict[TopicPartition, int], slices: list[Slice]
) -> Iterator[Message]:
    """The messages, whose order is noted in `slices` as they are taken, run-length encoded. Moves
    `positions` behind them.
    """
    for where, run in groupby(messages, attrgetter("topic", "partition")):
        count = end = 0
        for message in run:
            count, end = count + 1, message.offset + 1
            yield message
        slices.append(
            Slice(
                topic=where[0],
                partition=where[1],
                start=positions.get(where, 0),
                end=end,
                count=count,
            )
        )
        positions[where] = end


def entries(log: Log, topic: str, start: int = 0) -> Iterator[tuple[int, Record]]:
    """(offset, record) of a journal, from an offset on."""
    for message in read(log, topic, 0, start):
        if is_chunk(message):
            continue  # the end of a record whose beginning is deleted
        yield message.offset, decode(dict(message.headers)["schema"], message.value or b"")


def last_record(log: Log, topic: str, kind: type[R]) -> R | None:
    """The last record of that kind in a journal, found from the end; None when there is none."""
    end, tail, found = end_offset(log, topic, 0), TAIL, None
    while found is None and end > 0:
        for _, record in entries(log, topic, max(beginning_offset(log, topic, 0), end - tail)):
            found = record if isinstance(record, kind) else found
        if tail >= end:
            break
        tail *= 8
    return found


@dataclass
class SliceReader:
    """Reads slices of inputs again, in the order asked, each partition forward only."""

    log: Log
    schemas_of: Callable[[str], tuple[str, ...]]  # of a topic
    records_read: int = 0
    _open: dict[TopicPartition, tuple[Reader, list[Message]]] = field(
        default_factory=dict[Any, Any]
    )

    def read_slice(self, part: Slice) -> list[Message]:
        """Those of a slice, as they lie in the log. Raises InputGone when they are not all there
        any more.
        """
        messages = list(self._read_range((part.topic, part.partition), part.start, part.end - 1))
        if len(messages) != part.count:
            where = f"{part.topic}[{part.partition}] {part.start} to {part.end}"
            raise InputGone(
                f"{where} held {part.count} records, now {len(messages)}: retention or somebody has removed them"
            )
        return messages

    def read_records(self, references: Collection[RecordRef]) -> dict[RecordRef, Event]:
        """Single records, wherever they lie. One that retention has deleted comes as an event
        without a record.
        """
        found: dict[RecordRef, Event] = {}
        begin = first_offsets(self.log, {(topic, partition) for topic, partition, _ in references})
        for topic, partition, offset in references:
            if offset < begin[topic, partition]:
                found[topic, partition, offset] = Event(topic, partition, offset, "", None)
        for where in sorted(begin):
            there = sorted(
                offset
                for topic, partition, offset in references
                if (topic, partition) == where and offset >= begin[where]
            )
            for offsets in split_at_gaps(there):
                wanted = set(offsets)
                for message in self._read_range(where, offsets[0], offsets[-1]):
                    if message.offset in wanted:
                        found[*where, message.offset] = to_event(message, self.schemas_of(where[0]))
            if there:
                self._close(where)
        if missing := set(references) - found.keys():
            raise InputGone(
                f"{len(missing)} records that a snapshot refers to are gone, the first {min(missing)}: somebody has removed them"
            )
        return found

    def close(self) -> None:
        for where in list(self._open):
            self._close(where)

    def _close(self, where: TopicPartition) -> None:
        self._open.pop(where)[0].close()

    def _read_range(self, where: TopicPartition, start: int, last: int) -> Iterator[Message]:
        """Messages with start <= offset <= last, where `last` is that of a message."""
        if where not in self._open:
            self._open[where] = (
                self.log.reader(
                    {where: max(start, beginning_offset(self.log, *where))}, bounded=True
                ),
                [],
            )
        reader, buffer = self._open[where]
        progress = BoundedReader(reader, where, last + 1)
        while True:
            while not buffer:
                if reader.position(*where) > last:
                    return
                buffer.extend(reversed(progress.poll()))
            message = buffer[-1]
            if message.offset > last:
                return
            buffer.pop()
            if message.offset >= start:
                self.records_read += 1
                yield message
            if message.offset == last:
                return


def first_offsets(log: Log, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The first offset that each partition still has; of a topic that does not exist any more:
    NOTHING_LEFT.
    """
    there = log.topics()
    begin = log.beginning_offsets([where for where in partitions if where[0] in there])
    return {where: begin.get(where, NOTHING_LEFT) for where in partitions}


def is_gone(start: int, begin: int) -> bool:
    """Has retention deleted records from offset `start` on, where `begin` is the first offset left?
    A single offset may be a transaction's marker.
    """
    return start < begin - 1


def split_at_gaps(offsets: Sequence[int]) -> Iterator[Sequence[int]]:
    """Ascending offsets, cut where more than SKIP_RECORDS lie between two of them."""
    if not offsets:
        return
    start = 0
    for place in range(1, len(offsets)):
        if offsets[place] - offsets[place - 1] > SKIP_RECORDS:
            yield offsets[start:place]
            start = place
    yield offsets[start:]
