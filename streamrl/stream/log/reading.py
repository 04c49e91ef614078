"""Reads a partition up to an end that is known, and divides what was read for transactions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from streamrl.stream.log.protocol import (
    Log,
    Message,
    Offsets,
    Reader,
    TopicPartition,
    beginning_offset,
    end_offset,
)
from streamrl.system.errors import BrokerUnreachable

T = TypeVar("T")
STALLED_S = 30.0  # a read whose end is known gives up after so long without a record
POLL_S = 0.02
LONGEST_POLL_S = 1.0  # one poll counts for no more: the process itself may have been stopped
PORTION_MESSAGES = 500
PORTION_BYTES = 32_000_000


def read(
    log: Log,
    topic: str,
    partition: int,
    start: int | None = None,
    end: int | None = None,
    whole: bool = True,
) -> Iterator[Message]:
    """The committed messages of one partition with start <= offset < end, by default all that are
    there now.

    Transaction markers, which no reader sees, may follow the last message; so the end is reached by
    a message or by the reader's position. Raises BrokerUnreachable when nothing comes for
    `STALLED_S`.
    """
    start = beginning_offset(log, topic, partition) if start is None else start
    last = end_offset(log, topic, partition) if end is None else end
    if start >= last:
        return
    reader = log.reader({(topic, partition): start}, whole, bounded=True)
    try:
        bounded = BoundedReader(reader, (topic, partition), last)
        while True:
            messages = bounded.poll()
            for message in messages:
                if message.offset >= last:
                    return
                yield message
            if reader.position(topic, partition) >= last:
                return
    finally:
        reader.close()


def read_partitions(log: Log, starts: Offsets, ends: Offsets) -> Iterator[Message]:
    """The committed messages of many partitions, each with start <= offset < end, in any order of
    the partitions. One reader reads them all. Raises BrokerUnreachable when nothing comes for
    `STALLED_S`.
    """
    left = {tp: ends[tp] for tp, start in starts.items() if start < ends[tp]}
    if not left:
        return
    reader = log.reader({tp: starts[tp] for tp in left}, bounded=True)
    idle_s = 0.0
    try:
        while left:
            began_s = time.monotonic()
            positions = {tp: reader.position(*tp) for tp in left}
            messages = reader.poll(500, POLL_S)
            for message in messages:
                if message.offset < ends[message.topic, message.partition]:
                    yield message
            moved = {tp: reader.position(*tp) for tp in left}
            left = {tp: end for tp, end in left.items() if moved[tp] < end}
            if messages or moved != positions:
                idle_s = 0.0
                continue
            idle_s += min(time.monotonic() - began_s, LONGEST_POLL_S)
            if idle_s >= STALLED_S:
                topic, partition = next(iter(left))
                raise stalled(topic, partition, moved[topic, partition], left[topic, partition])
    finally:
        reader.close()


def stalled(topic: str, partition: int, position: int, end: int) -> BrokerUnreachable:
    return BrokerUnreachable(
        f"{topic}[{partition}]: nothing has come for {STALLED_S:.0f} s at offset "
        f"{position} of {end}; is the broker up? Ask again when it is"
    )


def portions(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """The messages in lists that each fit into a transaction: at most PORTION_MESSAGES, and little
    more than PORTION_BYTES.
    """
    return split_by_size(
        messages, lambda message: len(message.value or b""), PORTION_MESSAGES, PORTION_BYTES
    )


def split_by_size(
    items: Iterable[T], size_of: Callable[[T], int], max_items: int, enough_bytes: int
) -> Iterator[list[T]]:
    """The items in lists of at most `max_items`. A list is complete as soon as its items have
    `enough_bytes` together.
    """
    some: list[T] = []
    size = 0
    for item in items:
        some.append(item)
        size += size_of(item)
        if len(some) >= max_items or size >= enough_bytes:
            yield some
            some = []
            size = 0
    if some:
        yield some


class BoundedReader:
    """Polls one partition up to an offset, and gives up when nothing comes, so that no command
    waits forever for a broker that is gone.
    """

    def __init__(self, reader: Reader, tp: TopicPartition, end: int) -> None:
        self._reader = reader
        self._tp = tp
        self._end = end
        self._position = reader.position(*tp)
        self._idle_s = 0.0

    def poll(self) -> list[Message]:
        """The next messages. Raises BrokerUnreachable when the position has not moved for
        `STALLED_S`.
        """
        began_s = time.monotonic()
        messages = self._reader.poll(500, POLL_S)
        position = self._reader.position(*self._tp)
        if messages or position > self._position:
            self._position = position
            self._idle_s = 0.0
            return messages
        # A process that was stopped meanwhile has not waited for the broker.
        self._idle_s += min(time.monotonic() - began_s, LONGEST_POLL_S)
        if self._idle_s >= STALLED_S:
            raise stalled(*self._tp, position, self._end)
        return messages
