"""What a part knows of the log: messages by topic, partition and offset; one way in, one way out.

Topics are named without the run (`rollouts.copy-digits`); the log that is handed to a part adds it.
`kafka.py` is the log on a broker, `memory.py` the same in one process;
tests/log/test_contract.py holds both to this page. A part whose outputs cannot be computed again
(an env, the learner) writes through `retrying.RetryingWriter`, which finds out whether a failed
transaction was committed, and commits it again if not.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from streamrl.errors import BrokerUnreachable, TopicMissing
from streamrl.records import Record

STALLED_S = 30.0  # a read whose end is known gives up after so long without a record
POLL_S = 0.02
LONGEST_POLL_S = 1.0  # of one poll: what is longer was spent elsewhere
PORTION_MESSAGES = 500
PORTION_BYTES = 32_000_000

TopicPartition = tuple[str, int]
Positions = Mapping[TopicPartition, int]  # the next offset to read


class Message(NamedTuple):
    """Bytes as they lie in the log (read), or as they are to be written (offset -1; partition -1:
    chosen by the key).
    """

    topic: str
    key: bytes | None
    value: bytes | None  # None: a tombstone
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int = -1
    offset: int = -1
    timestamp_s: float = 0.0


class Event:
    """A decoded message: what a step function takes, and may hold. `record` is None for a
    tombstone.

    A plain class on purpose: a state that holds one is written with a reference in its place
    (`snapshots.py`).
    """

    __slots__ = ("headers", "key", "offset", "partition", "record", "topic", "value")

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        key: str,
        record: Record | Undecodable | None,
        # as it came: what a dead letter is made of. The record's arrays are views of it, so it is
        # there anyway
        value: bytes | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        self.topic, self.partition, self.offset, self.key, self.record = (
            topic,
            partition,
            offset,
            key,
            record,
        )
        self.value, self.headers = value, headers

    def __repr__(self) -> str:
        return f"Event({self.topic}[{self.partition}]@{self.offset} {self.key!r} {self.record!r})"


class Undecodable(NamedTuple):
    """Stands in an event for a record that cannot be read. `value` and `headers` are kept as they
    were.
    """

    cause: str
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


class Output(NamedTuple):
    """What a step function gives: a record for a topic. A null record is a tombstone; `Undecodable`
    goes out as it came in.
    """

    topic: str
    key: str
    record: Record | Undecodable | None


class Reader(Protocol):
    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        """Up to `max_messages` committed messages, in the order of each partition; fewer, or none,
        after `timeout_s`.
        """
        ...

    def position(self, topic: str, partition: int) -> int:
        """Offset of the next message; behind the last one, at the end of the log, transaction
        markers are passed too.
        """
        ...

    def pause(self, topics: Collection[str]) -> None:
        """Take nothing from the partitions of these topics, and again from all others. Positions
        stay.
        """
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    def commit(self, messages: Sequence[Message]) -> int:
        """Write all messages in one transaction, or raise and leave nothing. Returns the offset of
        the last message.

        Raises `Fenced` when another process has taken this identity or the broker has ended the
        transaction because it stood still for too long, `TransactionFailed` for anything else. The
        writer is of no use afterwards (`retrying.py` opens another).
        """
        ...

    def commit_offsets(self, positions: Positions, wait: bool = True) -> bool:
        """Commit consumer offsets, for whoever looks at lag (`Log.committed_offsets`). They are
        advisory: on restart a part resumes from its journal or checkpoint, never from these. A part
        that starts from the committed offsets of another part may repeat work, but loses nothing.

        This is not part of any transaction, and never ends a part: it returns False, with a
        warning, when the log does not take the offsets for now. With `wait` it raises AccessDenied
        where this process may not commit. Without, a commit may be lost; `close` gives the last one
        a moment to arrive.
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

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Offset of the first message that each partition still keeps."""
        ...

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The last stable offset of each partition: behind the last message that a reader may see.

        Another writer's transaction shows a moment after its commit returned; a writer's own
        earlier ones always show once `writer` has returned.
        """
        ...

    def reader(self, positions: Positions, whole: bool = True, bounded: bool = False) -> Reader:
        """A reader of these partitions, each from its offset. An offset that retention has removed
        raises `InputGone` on poll.

        `whole`: records that are larger than a message are joined (`chunks.py`); otherwise their
        chunks are read as they lie there. `bounded`: it is not to follow; that the end is reached
        shows at once, and a broker is asked more often.
        """
        ...

    def writer(self, identity: str, changelog_topic: str = "") -> Writer:
        """The one transactional writer of that name: an earlier one is fenced, and what it left
        open is aborted, before this returns.

        `changelog_topic`: the topic, of one partition, from which the next instance learns what the
        last one did. This returns only once everything in it is committed or aborted, and raises
        BrokerError where that does not happen.
        """
        ...

    def plain_writer(self) -> PlainWriter: ...

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        """The offsets that the writer of that name has committed last."""
        ...

    def close(self) -> None: ...


def beginning_offset(log: Log, topic: str, partition: int) -> int:
    """Offset of the first message that one partition still keeps."""
    return log.beginning_offsets([(topic, partition)])[topic, partition]


def end_offset(log: Log, topic: str, partition: int) -> int:
    """The last stable offset of one partition."""
    return log.end_offsets([(topic, partition)])[topic, partition]


def partition_count(log: Log, topic: str) -> int:
    """Number of partitions of a topic. Raises TopicMissing."""
    return len(partitions_of(log, [topic]))


def partitions_of(log: Log, topics: Iterable[str]) -> list[TopicPartition]:
    """Every partition of these topics. Raises TopicMissing.

    The log is asked once, however many topics there are: a run may have hundreds of envs.
    """
    counts = log.topics()
    partitions: list[TopicPartition] = []
    for topic in topics:
        if topic not in counts:
            # A log that does not see the topic may know why, and says so when it is to read it:
            # this process may lack the right.
            log.reader({(topic, 0): 0}).close()
            raise TopicMissing(
                f"topic {topic} is missing; create it with `streamrl topics apply RUN.yaml`"
            )
        partitions += [(topic, partition) for partition in range(counts[topic])]
    return partitions


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
        progress = Progress(reader, (topic, partition), last)
        while True:
            messages = progress.poll()
            for message in messages:
                if message.offset >= last:
                    return
                yield message
            if reader.position(topic, partition) >= last:
                return
    finally:
        reader.close()


def portions(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """The messages in lists that a transaction each is not too large for: of PORTION_MESSAGES and
    little more than PORTION_BYTES at most.
    """
    portion, size = list[Message](), 0
    for message in messages:
        portion.append(message)
        size += len(message.value or b"")
        if len(portion) >= PORTION_MESSAGES or size >= PORTION_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


class Progress:
    """Polls one partition up to an offset, and gives up when the log stands still, so that no
    command waits for ever for a broker that is gone.
    """

    def __init__(self, reader: Reader, where: TopicPartition, last: int) -> None:
        self._reader = reader
        self._where = where
        self._last = last
        self._position = reader.position(*where)
        self._idle_s = 0.0

    def poll(self) -> list[Message]:
        """The next messages. Raises BrokerUnreachable when the position has not moved for
        `STALLED_S`.
        """
        began_s = time.monotonic()
        messages = self._reader.poll(500, POLL_S)
        position = self._reader.position(*self._where)
        if messages or position > self._position:
            self._position = position
            self._idle_s = 0.0
            return messages
        # a process that was stopped meanwhile has not waited for the broker
        self._idle_s += min(time.monotonic() - began_s, LONGEST_POLL_S)
        if self._idle_s >= STALLED_S:
            topic, partition = self._where
            stands = f"{topic}[{partition}]: nothing has come for {STALLED_S:.0f} s at offset {position} of {self._last}"
            raise BrokerUnreachable(f"{stands}; is the broker up? Ask again when it is")
        return messages
