"""The log in one process, for tests and replays: the same rules as a broker, none of the network.

Each transaction leaves a marker in every partition it wrote to, as Kafka does, so offsets have gaps
here too.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence

from streamrl.errors import Fenced, InputGone, TopicMissing
from streamrl.log.chunks import JoiningReader, split
from streamrl.log.protocol import Log, Message, Positions, Reader, TopicPartition


class MemoryLog:
    """Topics as lists of messages; `None` in a list is a transaction marker."""

    def __init__(self, topics: Mapping[str, int]) -> None:
        self._partitions: dict[TopicPartition, list[Message | None]] = {}
        # offset of the first message kept, which is the first of the list
        self._starts: dict[TopicPartition, int] = {}
        self._counts: dict[str, int] = {}
        for topic, count in topics.items():
            self.add(topic, count)
        self._epochs: dict[str, int] = {}
        self._positions: dict[str, dict[TopicPartition, int]] = {}
        self._lock = threading.Condition()

    def add(self, topic: str, partitions: int) -> None:
        """Make another topic."""
        self._counts[topic] = partitions
        for partition in range(partitions):
            self._partitions[topic, partition] = []
            self._starts[topic, partition] = 0

    def topics(self) -> dict[str, int]:
        return dict(self._counts)

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        with self._lock:
            return {tp: self._first(tp) for tp in partitions}

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        with self._lock:
            return {tp: self._first(tp) + len(self._partitions[tp]) for tp in partitions}

    def reader(self, positions: Positions, whole: bool = True, bounded: bool = False) -> Reader:
        reader = MemoryReader(self, positions)
        return JoiningReader(reader, positions, self) if whole else reader

    def writer(self, identity: str, changelog_topic: str = "") -> MemoryWriter:
        with self._lock:
            self._epochs[identity] = self._epochs.get(identity, 0) + 1
            return MemoryWriter(self, identity, self._epochs[identity])

    def plain_writer(self) -> MemoryPlainWriter:
        return MemoryPlainWriter(self)

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        return dict(self._positions.get(identity, {}))

    def delete_before(self, starts: Positions) -> None:
        """Delete the messages of each partition below an offset, as retention would."""
        with self._lock:
            for where, offset in starts.items():
                if (count := offset - self._starts[where]) > 0:
                    del self._partition(*where)[:count]
                    self._starts[where] = offset

    def close(self) -> None: ...

    def append(self, messages: Sequence[Message], marker: bool) -> list[int]:
        """All messages, each at the end of its partition; then the markers."""
        messages = split(messages)
        with self._lock:
            chosen = [self._choose(message) for message in messages]
            offsets: list[int] = []
            for message, (topic, partition) in zip(messages, chosen, strict=True):
                messages_there = self._partitions[topic, partition]
                offset = self._starts[topic, partition] + len(messages_there)
                offsets.append(offset)
                messages_there.append(
                    message._replace(partition=partition, offset=offset, timestamp_s=time.time())
                )
            for where in set(chosen) if marker else ():
                self._partitions[where].append(None)
            self._lock.notify_all()
            return offsets

    def commit(self, identity: str, epoch: int, messages: Sequence[Message]) -> int:
        with self._lock:
            if self._epochs[identity] != epoch:
                raise Fenced(
                    f"{identity}: another process with this identity has taken over; stop one of the two"
                )
            offsets = self.append(messages, marker=True)
            return offsets[-1] if offsets else -1

    def commit_offsets(self, identity: str, positions: Positions) -> None:
        with self._lock:
            self._positions.setdefault(identity, {}).update(positions)

    def take(self, where: TopicPartition, start: int, count: int) -> tuple[list[Message], int]:
        """Up to `count` messages from `start`, and the position behind them."""
        with self._lock:
            there, first = self._partition(*where), self._starts[where]
            if not first <= start <= first + len(there):
                raise InputGone(
                    f"{where[0]}[{where[1]}] has no offset {start}; it begins at {first} and ends at {first + len(there)}"
                )
            found: list[Message] = []
            while start < first + len(there) and len(found) < count:
                message = there[start - first]
                start += 1
                if message is not None:
                    found.append(message)
            return found, start

    def wait(self, timeout_s: float) -> None:
        with self._lock:
            self._lock.wait(timeout_s)

    def _first(self, tp: TopicPartition) -> int:
        self._partition(*tp)
        return self._starts[tp]

    def _partition(self, topic: str, partition: int) -> list[Message | None]:
        try:
            return self._partitions[topic, partition]
        except KeyError:
            raise TopicMissing(
                f"topic {topic} has no partition {partition}; create it with `streamrl topics apply`"
            ) from None

    def _choose(self, message: Message) -> TopicPartition:
        if message.topic not in self._counts:
            raise TopicMissing(
                f"topic {message.topic} does not exist; create it with `streamrl topics apply`"
            )
        partition = (
            message.partition
            if message.partition >= 0
            else zlib.crc32(message.key or b"") % self._counts[message.topic]
        )
        return message.topic, partition


class MemoryReader:
    def __init__(self, log: MemoryLog, positions: Positions) -> None:
        self._log, self._positions, self._paused = log, dict(positions), frozenset[str]()
        log.beginning_offsets(positions)  # raises TopicMissing

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        deadline = time.monotonic() + timeout_s
        while True:
            found: list[Message] = []
            for where in self._positions:
                if where[0] not in self._paused:
                    messages, self._positions[where] = self._log.take(
                        where, self._positions[where], max_messages - len(found)
                    )
                    found += messages
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            self._log.wait(left)

    def position(self, topic: str, partition: int) -> int:
        return self._positions[topic, partition]

    def pause(self, topics: Collection[str]) -> None:
        self._paused = frozenset(topics)

    def close(self) -> None: ...


class MemoryWriter:
    def __init__(self, log: MemoryLog, identity: str, epoch: int) -> None:
        self._log, self._identity, self._epoch = log, identity, epoch

    def commit(self, messages: Sequence[Message]) -> int:
        return self._log.commit(self._identity, self._epoch, messages)

    def commit_offsets(self, positions: Positions, wait: bool = True) -> bool:
        self._log.commit_offsets(self._identity, positions)
        return True

    def close(self) -> None: ...


class MemoryPlainWriter:
    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def send(self, message: Message) -> None:
        self._log.append([message], marker=False)

    def flush(self, timeout_s: float = 5.0) -> None: ...

    def close(self) -> None: ...


def _check(log: MemoryLog) -> Log:  # pyright: ignore[reportUnusedFunction]
    return log  # the type checker holds MemoryLog to the protocol here
