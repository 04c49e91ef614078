"""What a part knows of the log: messages by topic, partition and offset, one way in, one way out.

Topics are named without the run (`rollouts.copy-digits`); the log that a part is given adds it.
`kafka.py` is the log on a broker, `memory.py` the log in one process, `parquet.py` the one in
files; tests/stream/log/test_contract.py holds them to this page. Processors, envs and the learner
write through `retrying.RetryingWriter`, which finds out whether a failed transaction was committed,
and commits it again if not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from streamrl.stream.records import Record
from streamrl.system.errors import TopicMissing

TopicPartition = tuple[str, int]
Offsets = Mapping[TopicPartition, int]  # the next offset to read of each partition


class Message(NamedTuple):
    """Bytes as they are in the log, or as they are to be written. One that is to be written has no
    offset yet, and its key chooses the partition if it names none.
    """

    topic: str
    key: bytes | None
    value: bytes | None  # None: a tombstone
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int = -1
    offset: int = -1
    timestamp_s: float = 0.0
    # the messages of the records that it refers to, for a processor that joins them
    joined: tuple[Message, ...] = ()
    event: Event | None = None  # decoded, if that reader has done it


# Header of a message in place of a record that a client cannot hand over. Its value is the cause.
UNREADABLE = "streamrl.unreadable"


def unreadable(message: Message, cause: str) -> Message:
    """The message in place of a record of which only these parts can be had."""
    return message._replace(headers=unreadable_header(cause))


def unreadable_header(cause: str) -> tuple[tuple[str, bytes], ...]:
    """The headers of a message in place of a record that cannot be had."""
    return ((UNREADABLE, cause.encode()),)


def is_unreadable(message: Message) -> bool:
    """Whether the message is in place of a record that cannot be had."""
    return bool(message.headers) and message.headers[0][0] == UNREADABLE


class Event:
    """A decoded message: what a step function takes, and may keep in its state. `record` is None
    for a tombstone.

    This is a plain class on purpose: a snapshot of a state that holds one has a reference in its
    place (`stream/processor/snapshots.py`).
    """

    __slots__ = ("headers", "key", "offset", "partition", "record", "topic", "value")

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        key: str,
        record: Record | Undecodable | None,
        # The bytes of the record, for a dead letter. They cost nothing, because the arrays of the
        # record are views of them.
        value: bytes | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.key = key
        self.record = record
        self.value = value
        self.headers = headers

    def __repr__(self) -> str:
        return f"Event({self.topic}[{self.partition}]@{self.offset} {self.key!r} {self.record!r})"


class Undecodable(NamedTuple):
    """The record of an event that cannot be read. `value` and `headers` are unchanged."""

    cause: str
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


class Output(NamedTuple):
    """What a step function gives: a record for a topic. A record of None is a tombstone, and an
    `Undecodable` is written as it came.
    """

    topic: str
    key: str
    record: Record | Undecodable | None


class Reader(Protocol):
    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        """Return up to `max_messages` committed messages, in the order of each partition. After
        `timeout_s` there may be fewer, or none.
        """
        ...

    def position(self, topic: str, partition: int) -> int:
        """Offset of the next message. At the end of the log it is after the transaction markers
        that follow the last message.
        """
        ...

    def set_paused(self, topics: Collection[str]) -> None:
        """Pause the partitions of exactly these topics, and resume all others. Offsets stay."""
        ...

    def seek(self, offsets: Offsets) -> None:
        """Read exactly these partitions from now on, each from its offset. They are some of those
        that the reader was opened with.
        """
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    def commit(self, messages: Sequence[Message]) -> int:
        """Write all messages in one transaction, or raise and leave nothing. Returns the offset of
        the last message.

        Raises `Fenced` when another process has taken this identity, or when the broker has ended
        the transaction because it was idle for too long; raises `TransactionFailed` for anything
        else. After an error the writer is of no use (`retrying.py` opens another).
        """
        ...

    def commit_offsets(self, offsets: Offsets, wait: bool = True) -> bool:
        """Commit consumer offsets, for tools that show lag (`Log.committed_offsets`). They are
        advisory: on restart a part resumes from its journal or checkpoint, never from these. A part
        that starts from the committed offsets of another part may repeat work, but loses nothing.

        This is not part of any transaction, and never ends a part: it returns False, with a
        warning, when the log does not take the offsets for now. With `wait` it raises AccessDenied
        where this process may not commit. Without, a commit may be lost; `close` gives the last one
        a moment to arrive.
        """
        ...

    def close(self) -> None: ...


OnWritten = Callable[[int, int], None]
"""Called with the partition and the offset of a message that is in the log, or with -1 twice where
it could not be written. Of a record in chunks the offset is that of its last chunk.
"""


class NonTransactionalProducer(Protocol):
    def send(self, message: Message, on_written: OnWritten | None = None) -> None:
        """Write at least once, outside any transaction, and wait for nothing. `on_written` is
        called later, on any thread.
        """
        ...

    def flush(self, timeout_s: float = 30.0) -> None:
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
        """The last stable offset of each partition: after the last message that a reader may see.

        A transaction of another writer shows a moment after its commit has returned. Earlier ones
        of a writer's own identity always show once `writer` has returned.
        """
        ...

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        """A reader of these partitions, each from its offset. An offset that retention has removed
        raises `InputGone` on poll.

        `whole`: records that are larger than a message are joined (`chunks.py`), and claims
        (`claims.py`) are left out; otherwise messages are read as they are. `bounded`: the
        reader is to reach the end and not to follow it, so it asks the broker more often and learns
        at once that the end is reached.
        """
        ...

    def writer(self, identity: str, changelog_topic: str = "") -> Writer:
        """The one transactional writer of that identity. Before this returns, an earlier one is
        fenced and the transaction that it left open is aborted.

        `changelog_topic`: the topic, of one partition, from which the next instance learns what the
        last one did. This returns only once everything in it is committed or aborted, and raises
        BrokerError where that does not happen.
        """
        ...

    def producer(self, durable: bool = False) -> NonTransactionalProducer:
        """A writer of plain messages. `durable`: it sends each at once, and a message counts as
        written only when every replica of its partition has it.
        """
        ...

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        """The offsets that the writer of that identity has committed last."""
        ...

    def mark_ready(self, is_ready: bool = True) -> None:
        """The part can do its work from now on, or no longer. A log that measures its part
        (`instrumented.py`) makes that known; others need not.
        """

    def register_metrics_page(self, path: str, page: Callable[[], bytes]) -> None:
        """The part has a page next to its metrics, which is shown at this path."""

    def close(self) -> None: ...


def beginning_offset(log: Log, topic: str, partition: int) -> int:
    """Offset of the first message that one partition still keeps."""
    return log.beginning_offsets([(topic, partition)])[topic, partition]


def end_offset(log: Log, topic: str, partition: int) -> int:
    """The last stable offset of one partition."""
    return log.end_offsets([(topic, partition)])[topic, partition]


def partitions_of(log: Log, topics: Iterable[str]) -> list[TopicPartition]:
    """Every partition of these topics. Raises TopicMissing.

    The log is asked once, however many topics there are: a run may have hundreds of envs.
    """
    counts = log.topics()
    partitions: list[TopicPartition] = []
    for topic in topics:
        if topic not in counts:
            # A log that does not see the topic may know why, and raises it when it is to read it:
            # this process may lack the right.
            log.reader({(topic, 0): 0}).close()
            raise TopicMissing(
                f"topic {topic} is missing; create it with `streamrl topics apply RUN.yaml`"
            )
        partitions += [(topic, partition) for partition in range(counts[topic])]
    return partitions
