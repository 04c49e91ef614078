"""Reads ranges of many partitions in turns, for a restore and a replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from streamrl.stream.log.chunks import size_of
from streamrl.stream.log.protocol import Log, Message, Offsets, Reader, TopicPartition
from streamrl.stream.log.reading import BoundedReader, read_partitions
from streamrl.system.errors import InputGone

FETCH_BYTES = 1_000_000  # of one partition before another is read
AHEAD_BYTES = 256_000_000
# Where more records than this are between two that are wanted, the reader moves over them.
SKIP_RECORDS = 2_000


class PartitionsReader:
    """Reads ranges of many partitions, of each forwards, with a single reader: one for each
    partition would take 4 threads, 8 descriptors and 16 MB apiece.

    What was read ahead of a partition is kept while others are read, AHEAD_BYTES of all together.
    What does not fit is read again.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._reader: Reader | None = None
        self._current: TopicPartition | None = None  # the partition that the reader is at
        # By partition, the one used last at the end: the messages that were read ahead, and the
        # offset from which on it is to be read after them.
        self._ahead: dict[TopicPartition, deque[Message]] = {}
        self._next: dict[TopicPartition, int] = {}
        self._ahead_bytes = 0
        self._position: dict[TopicPartition, int] = {}  # of a partition that was read: the next

    def read(self, tp: TopicPartition, start: int, last: int) -> Iterator[Message]:
        """The messages with start <= offset <= last, where `last` is the offset of a message. It is
        quick where `start` is little after the `last` of the partition's range before.
        Raises BrokerUnreachable when nothing comes for `STALLED_S`.
        """
        if tp not in self._next:
            self._open(tp)
        ahead = self._ahead.pop(tp)
        self._ahead[tp] = ahead
        if tp not in self._position:
            self._move(tp, max(start, self._next[tp]))
        elif start < self._position[tp] or start - self._next[tp] > SKIP_RECORDS:
            self._move(tp, start)
        while True:
            while not ahead:
                if self._next[tp] > last:
                    return
                self._fetch(tp, last)
            if ahead[0].offset > last:
                return
            message = ahead.popleft()
            self._ahead_bytes -= size_of(message)
            self._position[tp] = message.offset + 1
            if message.offset >= start:
                yield message
            if message.offset == last:
                return

    def read_ahead(self, starts: Offsets, ends: Offsets) -> None:
        """Read these ranges, `ends` excluded, before they are asked for, up to AHEAD_BYTES of all
        that is ahead. All partitions are read at once, while one after the other takes a question
        to the broker for each. What cannot be read now is left to `read`.
        """
        begins: dict[TopicPartition, int] = {}
        for tp, start in starts.items():
            if tp not in self._next:
                self._open(tp)
            if tp not in self._position or start > self._next[tp]:
                self._move(tp, max(start, self._next[tp]))
                self._position[tp] = self._next[tp]
            begins[tp] = self._next[tp]
        with suppress(InputGone):
            for message in read_partitions(self._log, begins, ends):
                tp = message.topic, message.partition
                self._ahead[tp].append(message)
                self._ahead_bytes += size_of(message)
                self._next[tp] = message.offset + 1
                if self._ahead_bytes >= AHEAD_BYTES:
                    break
        self._current = None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self.__init__(self._log)

    def _open(self, tp: TopicPartition) -> None:
        """Have a reader that has this partition, and those of all topics of its kind, as these are
        read next.
        """
        kind = tp[0].partition(".")[0]
        counts = self._log.topics()
        new = {
            (topic, partition)
            for topic, count in counts.items()
            for partition in range(count)
            if topic.partition(".")[0] == kind
        }
        begin = self._log.beginning_offsets({*new, tp} - self._next.keys())
        self._next |= begin
        self._ahead |= {partition: deque() for partition in begin}
        if self._reader is not None:
            self._reader.close()
        self._reader = self._log.reader(self._next, bounded=True)
        self._current = None

    def _fetch(self, tp: TopicPartition, last: int) -> None:
        """Read ahead of the partition: what comes first, and as much as there is at once, up to
        FETCH_BYTES. Raises BrokerUnreachable where nothing comes.
        """
        assert self._reader is not None
        if self._current != tp:
            self._reader.seek({tp: self._next[tp]})
            self._current = tp
        ahead = self._ahead[tp]
        fetched = 0
        bounded = BoundedReader(self._reader, tp, last + 1)
        messages: list[Message] = []
        while not messages and self._reader.position(*tp) <= last:
            messages = bounded.poll()
        while messages:
            ahead.extend(messages)
            fetched += sum(map(size_of, messages))
            if fetched >= FETCH_BYTES:
                break
            messages = self._reader.poll(500, 0.0)
        self._next[tp] = self._reader.position(*tp)
        self._ahead_bytes += fetched
        self._drop_oldest(tp)

    def _drop_oldest(self, current: TopicPartition) -> None:
        """Drop what was read ahead of the partitions that were used longest ago, until the rest
        fits.
        """
        for tp, ahead in self._ahead.items():
            if self._ahead_bytes <= AHEAD_BYTES:
                return
            if ahead and tp != current:
                self._move(tp, ahead[0].offset)

    def _move(self, tp: TopicPartition, offset: int) -> None:
        """Read the partition from this offset on, without what was read ahead of it."""
        self._ahead_bytes -= sum(map(size_of, self._ahead[tp]))
        self._ahead[tp].clear()
        self._next[tp] = offset
        if self._current == tp:
            self._current = None
