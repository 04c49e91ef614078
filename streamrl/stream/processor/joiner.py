"""Reads the records that inputs refer to (`join.py`).

The records that a topic refers to were written before it, and nearly in its order. So they are read
forwards, like an input, and those that nothing has referred to yet are kept for a while.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from streamrl.stream.log.chunks import size_of
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.partitions_reader import SKIP_RECORDS
from streamrl.stream.log.protocol import (
    Event,
    Log,
    Message,
    Offsets,
    Reader,
    TopicPartition,
    partitions_of,
    unreadable,
)
from streamrl.stream.log.reading import LONGEST_POLL_S, POLL_S, STALLED_S, stalled
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.join import NOT_THERE, RecordRef, lacks_references, to_joined_event
from streamrl.stream.records import Record
from streamrl.system.errors import BrokerUnreachable, InputGone, TopicMissing

# What was read and nothing has referred to so far is kept up to so many bytes, and the oldest of it
# is dropped. The room doubles whenever the reader has to go back, up to the most: it is then too
# small for the open groups of the run.
SPARE_BYTES = 16_000_000
MOST_SPARE_BYTES = 512_000_000
MESSAGE_BYTES = 1_000  # of the objects that a message is, on top of its content
FETCH_RECORDS = 500
# When nothing has come for so long, the broker is asked whether what is wanted exists. A partition
# has another leader sooner, so a broker that is away is not asked.
IDLE_S = 10.0


class ReferencedRecords:
    """Finds the records at some places of a log. It is told which are wanted, and finds them while
    it is polled.
    """

    def __init__(self, log: Log, topics: Collection[str], follows: bool) -> None:
        """`topics`: those that most of the places are in. `follows`: they grow meanwhile, and what
        is new is fetched before it is wanted.
        """
        self._log = log
        self._follows = follows
        self._topics = frozenset(topics)
        self._reader: Reader | None = None
        self._open = set[TopicPartition]()  # the partitions that the reader was opened with
        self._next = dict[TopicPartition, int]()  # by partition that was read: the next offset
        self._reading: frozenset[TopicPartition] = frozenset()  # by the reader now
        self._new = set[RecordRef]()  # wanted, and the reader was not moved to them so far
        self._unread = set[RecordRef]()  # wanted, and the reader is before them
        self._found = dict[RecordRef, Message]()  # wanted
        self._deleted = set[RecordRef]()  # wanted, and retention has deleted them
        self._spare = dict[RecordRef, Message]()  # not wanted so far, the first one read first
        self._spare_bytes = 0
        self._room_bytes = SPARE_BYTES
        self._idle_s = 0.0  # that nothing has come of the partitions of what is wanted
        self._was_gone = False  # whether the last poll has raised InputGone

    def want(self, places: Iterable[RecordRef]) -> None:
        """Find these records too."""
        for place in places:
            if place in self._unread or self.has([place]):
                continue
            spare = self._spare.pop(place, None)
            if spare is None:
                self._new.add(place)
            else:
                self._spare_bytes -= size_of(spare) + MESSAGE_BYTES
                self._found[place] = spare

    def has(self, places: Iterable[RecordRef]) -> bool:
        """Whether each of these records is found, or is known to be deleted."""
        return all(place in self._found or place in self._deleted for place in places)

    def take(self, places: Sequence[RecordRef]) -> tuple[Message, ...]:
        """These records, each of which is found or deleted. None of them if one is deleted. One
        that was never there is an unreadable message.
        """
        found = {place: self._found.pop(place, None) for place in places}
        self._deleted.difference_update(places)
        messages = [message for message in found.values() if message is not None]
        return tuple(messages) if len(messages) == len(found) else ()

    def poll(self, timeout_s: float) -> bool:
        """Read on, if some record is wanted that is not found. Returns whether anything was read,
        or was found not to be there.
        """
        is_known = self._move_to_new()
        if not self._unread or self._reader is None:
            return is_known
        wanted = frozenset((topic, partition) for topic, partition, _ in self._unread)
        if not self._follows and self._reading != wanted:
            self._seek(wanted)
        began_s = time.monotonic()
        try:
            messages = self._reader.poll(FETCH_RECORDS, timeout_s)
        except InputGone:
            self._close_reader()
            # It may be about a partition that was read before: another reader does without it.
            is_known = self._lose_missing() or not self._was_gone
            self._was_gone = True
            if not is_known:
                raise
            return True
        except BrokerUnreachable:
            self._close_reader()
            raise
        self._was_gone = False
        before = {tp: self._next[tp] for tp in wanted}
        for tp in self._reading:
            self._next[tp] = self._reader.position(*tp)
        for message in messages:
            place = message.topic, message.partition, message.offset
            if place in self._unread:
                self._unread.remove(place)
                self._found[place] = message
            elif place not in self._found and place not in self._spare:
                self._spare[place] = message
                self._spare_bytes += size_of(message) + MESSAGE_BYTES
        while self._spare_bytes > self._room_bytes:
            dropped = self._spare.pop(next(iter(self._spare)))
            self._spare_bytes -= size_of(dropped) + MESSAGE_BYTES
        has_moved = any(self._next[tp] > at for tp, at in before.items())
        self._idle_s = 0.0 if has_moved else self._idle_s + time.monotonic() - began_s
        if self._unread and self._idle_s >= IDLE_S:
            self._idle_s = 0.0
            is_known |= self._lose_missing()
        return self._lose_passed() or is_known or bool(messages)

    def stalled(self) -> BrokerUnreachable:
        """The error that one of the wanted records does not come."""
        assert self._reader is not None
        topic, partition, offset = min(self._unread)
        return stalled(topic, partition, self._next[topic, partition], offset + 1)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _close_reader(self) -> None:
        """Have another reader next time. What came with an error was not returned, and a reader of
        Kafka cannot be moved after it.
        """
        self.close()
        self._reader = None
        self._open.clear()
        self._next.clear()
        self._reading = frozenset()
        self._new |= self._unread
        self._unread.clear()

    def _move_to_new(self) -> bool:
        """Move the reader to the records that are newly wanted, where it is after them or far
        before them. Returns whether the partition of one of them does not exist.
        """
        if not self._new:
            return False
        unknown = {place[:2] for place in self._new} - self._open
        missing = self._reopen(unknown) if unknown else unknown
        absent = {place for place in self._new if place[:2] in missing}
        self._lose(absent)
        wanted = self._new - absent
        self._new.clear()
        self._unread |= wanted
        if self._reader is None:
            return bool(absent)
        partitions = {(topic, partition) for topic, partition, _ in wanted}
        # What was wanted before and is not read yet may come before what is new.
        first = _first_offsets(place for place in self._unread if place[:2] in partitions)
        moved = {
            tp: offset
            for tp, offset in first.items()
            if tp not in self._next or not 0 <= offset - self._next[tp] <= SKIP_RECORDS
        }
        if moved:
            if any(offset < self._next.get(tp, 0) for tp, offset in moved.items()):
                self._room_bytes = min(2 * self._room_bytes, MOST_SPARE_BYTES)
            self._next |= moved
            self._seek(self._reading | moved.keys())
        return bool(absent)

    def _seek(self, partitions: frozenset[TopicPartition]) -> None:
        """Read these partitions from now on, each from where it was read to."""
        assert self._reader is not None
        self._reader.seek({tp: self._next[tp] for tp in partitions})
        self._reading = partitions

    def _reopen(self, unknown: set[TopicPartition]) -> set[TopicPartition]:
        """Have a reader that can read these partitions too, and the others of their topics. Returns
        those that do not exist.
        """
        counts = self._log.topics()
        topics = self._topics | {topic for topic, _ in unknown}
        with suppress(TopicMissing):
            # Raises AccessDenied where a topic is there, and this process may not see it.
            partitions_of(self._log, self._topics - counts.keys())
        existing = {(topic, p) for topic in topics for p in range(counts.get(topic, 0))}
        if existing - self._open:
            starts = self._log.beginning_offsets((self._open | existing) - self._next.keys())
            reader = self._log.reader({**starts, **self._next}, bounded=not self._follows)
            self.close()
            self._reader = reader
            self._open |= existing
            self._seek(self._reading)
        return unknown - self._open

    def _lose_missing(self) -> bool:
        """Find out which of the wanted records are not in the log: retention has deleted them, or
        they are after the end of their partition. Returns whether there is one.
        """
        wanted = self._new | self._unread
        partitions = {place[:2] for place in wanted}
        begin = self._log.beginning_offsets(partitions)
        end = self._log.end_offsets(partitions)
        deleted = {place for place in wanted if place[2] < begin[place[:2]]}
        absent = {place for place in wanted if place[2] >= end[place[:2]]}
        self._new -= deleted | absent
        self._unread -= deleted | absent
        self._deleted |= deleted
        self._lose(absent)
        return bool(deleted or absent)

    def _lose_passed(self) -> bool:
        """Find out which of the wanted records the reader has passed: there is no record at such a
        place. Returns whether there is one.
        """
        passed = {place for place in self._unread if self._next[place[:2]] > place[2]}
        self._lose(passed)
        return bool(passed)

    def _lose(self, places: Collection[RecordRef]) -> None:
        """Have an unreadable message in the place of these records, which do not exist."""
        self._unread.difference_update(places)
        for place in places:
            topic, partition, offset = place
            message = Message(topic, None, b"", partition=partition, offset=offset)
            self._found[place] = unreadable(message, NOT_THERE)


def _first_offsets(places: Iterable[RecordRef]) -> dict[TopicPartition, int]:
    """The lowest offset of each partition among these places."""
    first = dict[TopicPartition, int]()
    for topic, partition, offset in places:
        first[topic, partition] = min(offset, first.get((topic, partition), offset))
    return first


class Joiner:
    """Gives messages the records that they refer to (`Message.joined`)."""

    def __init__(self, log: Log, processor: Processor[Any, Any], follows: bool = False) -> None:
        """`processor`: one that joins its inputs. `follows`: these are new."""
        assert processor.join is not None
        self._join = processor.join
        self._schemas_of = processor.schemas_of
        self._expires_removed = processor.expires_removed
        self._records = ReferencedRecords(log, processor.join.topics, follows)
        self._waiting = deque[tuple[Message, Sequence[RecordRef]]]()

    def add(self, messages: Iterable[Message]) -> None:
        """Find the records that these messages refer to."""
        for message in messages:
            event = to_event(message, self._schemas_of(message.topic))
            record = event.record
            places = self._join.references(record) if isinstance(record, Record) else ()
            self._records.want(places)
            self._waiting.append((message._replace(event=event), places))

    @property
    def waiting(self) -> int:
        """How many messages were added and not taken."""
        return len(self._waiting)

    def first_waiting(self, topic: str, partition: int) -> int | None:
        """The offset of the first of these messages that is of this partition."""
        for message, _ in self._waiting:
            if (message.topic, message.partition) == (topic, partition):
                return message.offset
        return None

    def clear(self) -> None:
        """Forget these messages."""
        self._waiting.clear()

    def take(self) -> list[Message]:
        """The first messages whose records are there, with these. Raises InputGone if one is gone,
        unless the processor continues without it.
        """
        ready = list[Message]()
        while self._waiting:
            message, places = self._waiting[0]
            if not self._records.has(places):
                self._records.want(places)  # Another message has taken one that both refer to.
                break
            joined = self._records.take(places)
            if places and not joined and not self._expires_removed:
                raise InputGone(
                    f"{message.topic}[{message.partition}]@{message.offset} refers to records of "
                    f"{places[0][0]} that retention has deleted; to continue without them:"
                    " --set topics.on_removed=expire"
                )
            self._waiting.popleft()
            ready.append(message._replace(joined=joined))
        return ready

    def poll(self, timeout_s: float) -> bool:
        """Read on what the messages refer to. Returns whether anything has come."""
        return self._records.poll(timeout_s)

    def join(self, messages: Iterable[Message]) -> list[Message]:
        """These messages with the records that they refer to, which are in the log. Raises
        BrokerUnreachable when nothing comes for `STALLED_S`.
        """
        self.add(messages)
        joined = self.take()
        idle_s = 0.0
        while self._waiting:
            began_s = time.monotonic()
            if self._records.poll(POLL_S):
                idle_s = 0.0
            else:
                idle_s += min(time.monotonic() - began_s, LONGEST_POLL_S)
            if idle_s >= STALLED_S:
                raise self._records.stalled()
            joined += self.take()
        return joined

    def events(self, messages: Iterable[Message]) -> Iterator[Event]:
        """The joined events of these messages, which are in the log. One that refers to a record
        that is not there is without its own record.
        """
        for message in self.join(messages):
            event = to_joined_event(message, self._schemas_of(message.topic), self._join)
            if not isinstance(event.record, Record) or lacks_references(message, self._join):
                event.record = None
            yield event

    def close(self) -> None:
        self._records.close()


def joiner_of(log: Log, processor: Processor[Any, Any]) -> Joiner | None:
    """What joins the inputs of a processor in this log. None if none of them refers to others."""
    return None if processor.join is None else Joiner(log, processor)


def open_reader(log: Log, processor: Processor[Any, Any], offsets: Offsets) -> Reader:
    """A reader of the inputs of a processor, which come with the records that they refer to."""
    reader = log.reader(offsets)
    if processor.join is None:
        return reader
    return JoinedReader(reader, Joiner(log, processor, follows=True))


class JoinedReader(Reader):
    """A reader whose messages come with the records that they refer to. Those whose records are not
    there yet are not read, as far as its users see.
    """

    def __init__(self, reader: Reader, joiner: Joiner) -> None:
        self._reader = reader
        self._joiner = joiner

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        waiting = self._joiner.waiting
        if waiting < max_messages:
            wait_s = 0.0 if waiting else timeout_s
            self._joiner.add(self._reader.poll(max_messages - waiting, wait_s))
        ready = self._joiner.take()
        try:
            while self._joiner.waiting and self._joiner.poll(0.0 if ready else timeout_s):
                ready += self._joiner.take()
        except BrokerUnreachable:
            pass  # The next poll asks again.
        return ready

    def position(self, topic: str, partition: int) -> int:
        waiting = self._joiner.first_waiting(topic, partition)
        return self._reader.position(topic, partition) if waiting is None else waiting

    def set_paused(self, topics: Collection[str]) -> None:
        self._reader.set_paused(topics)

    def seek(self, offsets: Offsets) -> None:
        self._joiner.clear()
        self._reader.seek(offsets)

    def close(self) -> None:
        self._joiner.close()
        self._reader.close()
