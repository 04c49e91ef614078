"""What a part knows of the log: messages by topic, partition and offset; one way in, one way out.

Topics are named without the run (`rollouts.copy-digits`); the log that is handed to a part adds it. `kafka.py` is the log on a broker, `memory.py`
the same in one process; tests/stream/test_contract.py holds both to this page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from streamrl.records import Record

TopicPartition = tuple[str, int]
Positions = Mapping[TopicPartition, int]  # the next offset to read


class Message(NamedTuple):
    """Bytes as they lie in the log (read), or as they are to be written (offset -1; partition -1: chosen by the key)."""

    topic: str
    key: bytes | None
    value: bytes | None  # None: a tombstone
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int = -1
    offset: int = -1
    timestamp_s: float = 0.0


class Event(NamedTuple):
    """A decoded message: what a step function takes. `record` is None for a tombstone."""

    topic: str
    partition: int
    offset: int
    key: str
    record: Record | Undecodable | None


class Undecodable(NamedTuple):
    """Stands in an event for a record that cannot be read. `value` and `headers` are kept as they were."""

    cause: str
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


class Output(NamedTuple):
    """What a step function gives: a record for a topic. A null record is a tombstone; `Undecodable` goes out as it came in."""

    topic: str
    key: str
    record: Record | Undecodable | None


class Reader(Protocol):
    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        """Up to `max_messages` committed messages, in the order of each partition; fewer, or none, after `timeout_s`."""
        ...

    def pause(self, topic: str) -> None:
        """Stop taking from the partitions of `topic`. Their positions stay."""
        ...

    def resume(self, topic: str) -> None: ...

    def close(self) -> None: ...


class Writer(Protocol):
    def commit(self, messages: Sequence[Message], positions: Positions | None = None) -> list[int]:
        """Write all messages and the input positions in one transaction, or raise and leave nothing. Returns their offsets.

        Raises `Fenced` when another process has taken this identity, `TransactionFailed` for anything else; either way the process ends.
        """
        ...

    def close(self) -> None: ...


class PlainWriter(Protocol):
    def send(self, message: Message) -> None:
        """Write outside any transaction; at least once, not waited for (metrics, heartbeats)."""
        ...

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until everything sent is in the log, or raise `BrokerUnreachable`."""
        ...

    def close(self) -> None: ...


class Log(Protocol):
    def topics(self) -> dict[str, int]:
        """Topics of this run, with their number of partitions."""
        ...

    def start(self, topic: str, partition: int) -> int:
        """Offset of the first message kept."""
        ...

    def end(self, topic: str, partition: int) -> int:
        """Offset behind the last committed message (the last stable offset: open transactions are not in it)."""
        ...

    def reader(self, positions: Positions) -> Reader:
        """A reader of these partitions, each from its offset. An offset that retention has removed raises `InputGone` on poll."""
        ...

    def writer(self, identity: str) -> Writer:
        """The one transactional writer of that name: an earlier one is fenced, and what it left open is aborted, before this returns."""
        ...

    def plain_writer(self) -> PlainWriter: ...

    def committed(self, identity: str) -> dict[TopicPartition, int]:
        """The input positions last committed by the writer of that name."""
        ...

    def close(self) -> None: ...


def read(log: Log, topic: str, partition: int, start: int, end: int | None = None) -> Iterator[Message]:
    """The committed messages of one partition with start <= offset < end (default: all there are now), then stop."""
    last = log.end(topic, partition) if end is None else end
    yield from read_until(log, topic, partition, start, last)


def read_until(log: Log, topic: str, partition: int, start: int, end: int) -> Iterator[Message]:
    """As `read`, for an `end` that is the last stable offset or lies right behind a message.

    Behind the last message a partition holds transaction markers, which no reader ever sees; so the end is also reached when the reader has
    nothing more although the log's own end is not below `end`.
    """
    position, idle = start, 0
    if position >= end:
        return
    reader = log.reader({(topic, partition): start})
    try:
        while position < end:
            messages = reader.poll(500, 0.05)
            idle = 0 if messages else idle + 1
            if idle >= 3 and reader_at_end(reader, topic, partition, end):
                return
            for message in messages:
                if message.offset >= end:
                    return
                position = message.offset + 1
                yield message
    finally:
        reader.close()


def reader_at_end(reader: Reader, topic: str, partition: int, end: int) -> bool:
    """Has the reader passed `end`, markers included?"""
    position = getattr(reader, "position", None)
    return position is None or position(topic, partition) >= end
