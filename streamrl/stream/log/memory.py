"""The log in one process, for tests and replays: the rules of a broker without the network.

Each transaction leaves a marker in every partition that it wrote to, as Kafka does, so offsets have
gaps here too.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence

from streamrl.stream.log.chunks import JoiningReader, split
from streamrl.stream.log.protocol import Log, Message, Offsets, OnWritten, Reader, TopicPartition
from streamrl.system.errors import Fenced, InputGone, TopicMissing


class MemoryLog(Log):
    """Topics as lists of messages; `None` in a list is a transaction marker."""

    def __init__(self, topics: Mapping[str, int]) -> None:
        self._counts: dict[str, int] = {}
        self._partitions: dict[TopicPartition, list[Message | None]] = {}
        # The beginning offset of each partition is that of the first element of its list.
        self._beginnings: dict[TopicPartition, int] = {}
        self._epochs: dict[str, int] = {}
        self._committed: dict[str, dict[TopicPartition, int]] = {}
        self._lock = threading.Condition()
        for topic, count in topics.items():
            self.add(topic, count)

    def add(self, topic: str, partitions: int) -> None:
        """Create another topic."""
        self._counts[topic] = partitions
        for partition in range(partitions):
            self._partitions[topic, partition] = []
            self._beginnings[topic, partition] = 0

    def topics(self) -> dict[str, int]:
        return dict(self._counts)

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        with self._lock:
            for tp in partitions:
                self._partition(tp)
            return {tp: self._beginnings[tp] for tp in partitions}

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        with self._lock:
            return {tp: len(self._partition(tp)) + self._beginnings[tp] for tp in partitions}

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        reader = MemoryReader(self, offsets)
        return JoiningReader(reader, offsets, self) if whole else reader

    def writer(self, identity: str, changelog_topic: str = "") -> MemoryWriter:
        with self._lock:
            self._epochs[identity] = self._epochs.get(identity, 0) + 1
            return MemoryWriter(self, identity, self._epochs[identity])

    def producer(self, durable: bool = False) -> MemoryProducer:
        return MemoryProducer(self)

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        return dict(self._committed.get(identity, {}))

    def delete_before(self, offsets: Offsets) -> None:
        """Delete the messages of each partition below an offset, as retention would."""
        with self._lock:
            for tp, offset in offsets.items():
                count = offset - self._beginnings[tp]
                if count > 0:
                    del self._partition(tp)[:count]
                    self._beginnings[tp] = offset

    def close(self) -> None: ...

    def append(self, messages: Sequence[Message], marker: bool) -> list[Message]:
        """Append each message to its partition, and then the transaction markers. Returns the
        messages with their partitions and offsets.
        """
        messages = split(messages)
        with self._lock:
            chosen = [self._choose_partition(message) for message in messages]
            appended: list[Message] = []
            for message, tp in zip(messages, chosen, strict=True):
                log = self._partitions[tp]
                offset = self._beginnings[tp] + len(log)
                stored = message._replace(partition=tp[1], offset=offset, timestamp_s=time.time())
                log.append(stored)
                appended.append(stored)
            if marker:
                for tp in set(chosen):
                    self._partitions[tp].append(None)
            self._lock.notify_all()
            return appended

    def commit(self, identity: str, epoch: int, messages: Sequence[Message]) -> int:
        with self._lock:
            if self._epochs[identity] != epoch:
                raise Fenced.taken_over(identity)
            appended = self.append(messages, marker=True)
            return appended[-1].offset if appended else -1

    def commit_offsets(self, identity: str, offsets: Offsets) -> None:
        with self._lock:
            self._committed.setdefault(identity, {}).update(offsets)

    def take(self, tp: TopicPartition, start: int, count: int) -> tuple[list[Message], int]:
        """Up to `count` messages from offset `start`, and the offset after them."""
        with self._lock:
            log = self._partition(tp)
            beginning = self._beginnings[tp]
            end = beginning + len(log)
            if not beginning <= start <= end:
                raise InputGone(
                    f"{tp[0]}[{tp[1]}] has no offset {start}; "
                    f"it begins at {beginning} and ends at {end}"
                )
            messages: list[Message] = []
            while start < end and len(messages) < count:
                message = log[start - beginning]
                start += 1
                if message is not None:
                    messages.append(message)
            return messages, start

    def wait(self, timeout_s: float) -> None:
        """Wait until something is appended."""
        with self._lock:
            self._lock.wait(timeout_s)

    def _partition(self, tp: TopicPartition) -> list[Message | None]:
        try:
            return self._partitions[tp]
        except KeyError:
            raise TopicMissing(
                f"topic {tp[0]} has no partition {tp[1]}; create it with `streamrl topics apply`"
            ) from None

    def _choose_partition(self, message: Message) -> TopicPartition:
        if message.topic not in self._counts:
            raise TopicMissing(
                f"topic {message.topic} does not exist; create it with `streamrl topics apply`"
            )
        partition = message.partition
        if partition < 0:
            partition = zlib.crc32(message.key or b"") % self._counts[message.topic]
        return message.topic, partition


class MemoryReader:
    def __init__(self, log: MemoryLog, offsets: Offsets) -> None:
        self._log = log
        self._offsets = dict(offsets)
        self._paused = frozenset[str]()
        log.beginning_offsets(offsets)  # raises TopicMissing

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        deadline = time.monotonic() + timeout_s
        while True:
            polled: list[Message] = []
            for tp, offset in self._offsets.items():
                if tp[0] in self._paused:
                    continue
                messages, self._offsets[tp] = self._log.take(tp, offset, max_messages - len(polled))
                polled += messages
            left_s = deadline - time.monotonic()
            if polled or left_s <= 0:
                return polled
            self._log.wait(left_s)

    def position(self, topic: str, partition: int) -> int:
        return self._offsets[topic, partition]

    def set_paused(self, topics: Collection[str]) -> None:
        self._paused = frozenset(topics)

    def seek(self, offsets: Offsets) -> None:
        self._offsets = dict(offsets)

    def close(self) -> None: ...


class MemoryWriter:
    def __init__(self, log: MemoryLog, identity: str, epoch: int) -> None:
        self._log = log
        self._identity = identity
        self._epoch = epoch

    def commit(self, messages: Sequence[Message]) -> int:
        return self._log.commit(self._identity, self._epoch, messages)

    def commit_offsets(self, offsets: Offsets, wait: bool = True) -> bool:
        self._log.commit_offsets(self._identity, offsets)
        return True

    def close(self) -> None: ...


class MemoryProducer:
    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def send(self, message: Message, on_written: OnWritten | None = None) -> None:
        last = self._log.append([message], marker=False)[-1]
        if on_written is not None:
            on_written(last.partition, last.offset)

    def flush(self, timeout_s: float = 30.0) -> None: ...

    def close(self) -> None: ...
