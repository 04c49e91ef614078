"""The log on an Apache Kafka broker, through librdkafka.

Settings that matter were measured: `retry.backoff.ms` 1 makes a transaction 5 ms instead of 105,
`fetch.queue.backoff.ms` 5 and batches of 4 MB double the throughput. A transactional call that
fails is not repeated by its producer, which would hang for minutes after the death of a broker: the
process ends, or `retrying.py` opens another producer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import OffsetSpec  # pyright: ignore[reportPrivateImportUsage]

from streamrl.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnreachable,
    Fenced,
    InputGone,
    StreamrlError,
    TopicMissing,
    TransactionFailed,
)
from streamrl.log.chunks import JoiningReader, size_of, split
from streamrl.log.kafka_admin import (
    CALL_TIMEOUT_S,
    COMMON,
    DENIED,
    FENCED,
    MISSING,
    RETRIABLE,
    START_TIMEOUT_S,
    Admin,
    access_denied,
    address_of,
    call_with_retries,
    topics_without_write_access,
)
from streamrl.log.protocol import (
    Log,
    Message,
    Offsets,
    OnWritten,
    Reader,
    TopicPartition,
    end_offset,
)

logger = logging.getLogger(__name__)

# After it the broker aborts a transaction. At MIN_BYTES_PER_S half a gigabyte can be written in it.
TRANSACTION_TIMEOUT_S = 60.0
MIN_BYTES_PER_S = 10_000_000  # a broker that takes less of a transaction is not waited for
# An open transaction of a process that has died is waited for so long.
SETTLE_TIMEOUT_S = TRANSACTION_TIMEOUT_S + 15.0
COMMIT_POLL_S = 0.005  # librdkafka reports an answer only at the end of a poll
# A broker that is silent is sent no more offset commits than these, so that what it has yet to
# answer takes no memory.
MAX_UNANSWERED = 8
DELIVERY_LIMIT_S = 30.0  # a producer forgets what it could not deliver within this time
DELIVERY_POLL_S = 0.2
LEAVE_S = 1.0  # for the last offset commit to arrive when a part ends
# What topics take, and what a dead letter says of a record that is as large as that.
MAX_MESSAGE_BYTES = 8 * 1024 * 1024 + 65_536

# A broker keeps a fetch that finds nothing for so long. Only then a bounded reader learns that the
# end is reached.
BOUNDED_WAIT_MS = 10
# The same for a reader that follows. A new record is sent at once, but a partition that is resumed
# waits for as long.
IDLE_WAIT_MS = 100

CONSUMER = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "auto.offset.reset": "error",  # an offset that is gone is an error, not a silent jump
    "enable.partition.eof": True,
    "fetch.queue.backoff.ms": 5,
    "fetch.message.max.bytes": 4_000_000,
    # fetched ahead of the reader; by default 64 MB, and a replay has a reader for every partition
    "queued.max.messages.kbytes": 16_000,
}
PRODUCER = {
    # as Java and kafka-python clients do, so that the same key goes to the same partition
    "partitioner": "murmur2_random",
    "linger.ms": 5,
    # One batch holds a transaction. Between several an idempotent producer spins: 16 us a rollout
    # instead of 6.
    "batch.size": 4_000_000,
    "message.max.bytes": MAX_MESSAGE_BYTES,
    "queue.buffering.max.kbytes": 512_000,
    "retry.backoff.ms": 1,
    "retry.backoff.max.ms": 10,
}
READER = "reader"  # the consumer group that readers name; they never commit offsets
TRANSACTIONAL = {
    "transaction.timeout.ms": round(TRANSACTION_TIMEOUT_S * 1000),
    "message.timeout.ms": round(TRANSACTION_TIMEOUT_S * 1000),  # `commit_limit_s` is shorter
    "socket.timeout.ms": 3_000,
    # librdkafka would believe in a group's coordinator, and wait for it, long after that broker has
    # died.
    "metadata.max.age.ms": 2_000,
}


class KafkaLog(Log):
    """The topics of one run on a broker. `settings` are passed to librdkafka, and need
    `bootstrap.servers`.
    """

    def __init__(self, settings: Mapping[str, Any], run: str) -> None:
        self.settings = {**COMMON, **settings}
        self.prefix = f"{run}."
        self._admin = Admin(settings)

    @property
    def address(self) -> str:
        return address_of(self.settings)

    def topics(self) -> dict[str, int]:
        return {
            name.removeprefix(self.prefix): len(topic.partitions)
            for name, topic in self._admin.visible_topics().items()
            if name.startswith(self.prefix)
        }

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return self._list_offsets(partitions, cast(OffsetSpec, OffsetSpec.earliest()))

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return self._list_offsets(partitions, cast(OffsetSpec, OffsetSpec.latest()))

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        # librdkafka would report a missing topic only after half a minute.
        self._require({topic for topic, _ in offsets})
        reader = KafkaReader(self.settings, self.prefix, offsets, bounded)
        return JoiningReader(reader, offsets, self) if whole else reader

    def writer(self, identity: str, changelog_topic: str = "") -> KafkaWriter:
        writer = KafkaWriter(self.settings, self.prefix, identity)
        if changelog_topic:
            self._wait_until_settled(changelog_topic)
        return writer

    def producer(self, durable: bool = False) -> KafkaProducer:
        return KafkaProducer(self.settings, self.prefix, durable)

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        asked = [
            KafkaTopicPartition(self.prefix + topic, partition)
            for topic, count in self.topics().items()
            for partition in range(count)
        ]
        consumer = Consumer({**self.settings, **CONSUMER, "group.id": self.prefix + identity})

        def ask() -> list[KafkaTopicPartition]:
            found = consumer.committed(asked, timeout=CALL_TIMEOUT_S)
            for tp in found:
                if tp.error is not None:
                    raise KafkaException(tp.error)
            return found

        try:
            found = call_with_retries(ask, self.address)
            return {self._without_prefix(tp): tp.offset for tp in found if tp.offset >= 0}
        finally:
            consumer.close()

    def delete_before(self, offsets: Offsets) -> None:
        """Delete the records of each partition below an offset, as retention would."""
        asked = [
            KafkaTopicPartition(self.prefix + topic, partition, offset)
            for (topic, partition), offset in offsets.items()
            if offset
        ]

        def delete() -> None:
            futures = self._admin.delete_records(asked, request_timeout=CALL_TIMEOUT_S)
            for future in futures.values():
                future.result()

        if asked:
            call_with_retries(delete, self.address)

    def close(self) -> None: ...

    def _wait_until_settled(self, topic: str, limit_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until everything in a topic is committed or aborted."""
        deadline = time.monotonic() + limit_s
        uncommitted = self._list_offsets(
            [(topic, 0)],
            cast(OffsetSpec, OffsetSpec.latest()),
            IsolationLevel.READ_UNCOMMITTED,
        )
        while (end := end_offset(self, topic, 0)) < uncommitted[topic, 0]:
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{self.prefix}{topic}[0]@{end} is neither committed nor aborted after "
                    f"{limit_s:.0f} s: {self.address} has lost the end of a transaction; "
                    "`kafka-transactions.sh find-hanging` names it"
                )
            time.sleep(0.01)

    def _list_offsets(
        self,
        partitions: Collection[TopicPartition],
        which: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[TopicPartition, int]:
        if not partitions:
            return {}
        asked: Any = {
            KafkaTopicPartition(self.prefix + topic, partition): which
            for topic, partition in partitions
        }

        def ask() -> dict[TopicPartition, int]:
            futures = self._admin.list_offsets(
                asked, isolation_level=isolation, request_timeout=CALL_TIMEOUT_S
            )
            try:
                offsets = {
                    self._without_prefix(tp): int(future.result().offset)
                    for tp, future in futures.items()
                }
            except KafkaException as exception:
                if exception.args[0].code() != KafkaError._NOENT:
                    raise
                # librdkafka says no more than that it has found no leader.
                self._require({topic for topic, _ in partitions})
                raise no_leader() from None
            # A broker that starts has partitions without a leader for a moment. librdkafka then
            # may answer with an offset that is none, and with no error.
            if min(offsets.values()) < 0:
                raise no_leader()
            return offsets

        return call_with_retries(ask, self.address)

    def _without_prefix(self, tp: KafkaTopicPartition) -> TopicPartition:
        return tp.topic.removeprefix(self.prefix), tp.partition

    def _require(self, topics: Collection[str]) -> None:
        """Raise TopicMissing or AccessDenied unless this client sees all of the topics."""
        missing = set(topics) - self.topics().keys()
        if not missing:
            return
        name = self.prefix + min(missing)
        metadata = call_with_retries(
            lambda: self._admin.list_topics(name, timeout=CALL_TIMEOUT_S), self.address
        )
        error = metadata.topics[name].error
        if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise access_denied(self.settings, f"read topic {name}")
        raise TopicMissing(
            f"topic {name} is missing on {self.address}; "
            "create it with `streamrl topics apply RUN.yaml`"
        )


def no_leader() -> KafkaException:
    return KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))


class KafkaReader:
    def __init__(
        self, settings: Mapping[str, Any], prefix: str, offsets: Offsets, bounded: bool = False
    ) -> None:
        self._settings = settings
        self._prefix = prefix
        self._offsets = dict(offsets)
        self._topics = {prefix + topic: topic for topic, _ in offsets}
        self._paused = frozenset[str]()
        reading = {
            "group.id": prefix + READER,
            "fetch.wait.max.ms": BOUNDED_WAIT_MS if bounded else IDLE_WAIT_MS,
        }
        self._consumer = Consumer({**settings, **CONSUMER, **reading})
        self._consumer.assign(
            [
                KafkaTopicPartition(prefix + topic, partition, offset)
                for (topic, partition), offset in offsets.items()
            ]
        )

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        messages: list[Message] = []
        raw: Any  # the stubs say that each of its parts may be missing
        for raw in self._consumer.consume(max_messages, timeout_s):
            if raw.error() is not None:
                self._on_error(raw)
                continue
            topic = self._topics[raw.topic()]
            partition = raw.partition()
            offset = raw.offset()
            self._offsets[topic, partition] = offset + 1
            messages.append(
                Message(
                    topic=topic,
                    key=raw.key(),
                    value=raw.value(),
                    headers=tuple([(name, value or b"") for name, value in raw.headers() or ()]),
                    partition=partition,
                    offset=offset,
                    timestamp_s=raw.timestamp()[1] / 1000,
                )
            )
        return messages

    def _on_error(self, raw: Any) -> None:
        """Note that the end of a partition is reached, or raise. An error of the group has no
        topic.
        """
        error = raw.error()
        tp = self._topics.get(raw.topic(), ""), raw.partition()
        if error.code() == KafkaError._PARTITION_EOF:
            self._offsets[tp] = max(self._offsets[tp], raw.offset())
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise InputGone(
                f"{tp[0]}[{tp[1]}] no longer has offset {self._offsets[tp]}: "
                "retention has removed it; lengthen topics.retention_hours"
            )
        elif error.code() in MISSING:
            raise TopicMissing(
                f"topic {raw.topic()} is missing on {address_of(self._settings)}; "
                "create it with `streamrl topics apply RUN.yaml`"
            )
        elif error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise access_denied(self._settings, f"use group {self._prefix}{READER}")
        elif error.code() in DENIED:
            raise access_denied(self._settings, f"read topic {raw.topic()}")
        elif error.code() not in RETRIABLE:
            address = address_of(self._settings)
            raise BrokerError(f"reading {raw.topic()} from {address}: {error.str()}")

    def position(self, topic: str, partition: int) -> int:
        return self._offsets[topic, partition]

    def set_paused(self, topics: Collection[str]) -> None:
        wanted = frozenset(topics)
        if pause := self._partitions_of(wanted - self._paused):
            self._consumer.pause(pause)
        if resume := self._partitions_of(self._paused - wanted):
            self._consumer.resume(resume)
        self._paused = wanted

    def _partitions_of(self, topics: Collection[str]) -> list[KafkaTopicPartition]:
        return [
            KafkaTopicPartition(self._prefix + topic, partition)
            for topic, partition in self._offsets
            if topic in topics
        ]

    def close(self) -> None:
        self._consumer.close()


class KafkaWriter:
    """One transactional producer. It is of no use after its first failure: the next producer of the
    same identity aborts what it left open.
    """

    def __init__(self, settings: Mapping[str, Any], prefix: str, identity: str) -> None:
        self._settings = settings
        self._prefix = prefix
        self._identity = identity
        name = prefix + identity
        transactional = {**TRANSACTIONAL, "transactional.id": name}
        self._producer = Producer({**settings, **PRODUCER, **transactional})
        # Offsets are committed under the name of the part, where ordinary lag tools look. In the
        # transaction they would cost two requests and a marker.
        self._committer = OffsetCommitter(settings, name)
        try:
            self._take_identity()
        except AccessDenied:
            raise access_denied(settings, f"write as transactional id {name}") from None

    def _take_identity(self) -> None:
        """Fence whoever had this identity. The broker first ends a transaction that was left open,
        and as long as a broker answers at all, that is waited for.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            try:
                call_with_retries(
                    lambda: self._producer.init_transactions(CALL_TIMEOUT_S),
                    address_of(self._settings),
                    START_TIMEOUT_S,
                )
                return
            except BrokerUnreachable:
                if time.monotonic() >= deadline or not self._broker_answers():
                    raise

    def _broker_answers(self) -> bool:
        try:
            self._producer.list_topics(timeout=CALL_TIMEOUT_S)
            return True
        except KafkaException:
            return False

    def commit(self, messages: Sequence[Message]) -> int:
        last_offset = -1
        undelivered: list[KafkaError] = []

        def on_delivery(error: KafkaError | None, written: Any) -> None:
            nonlocal last_offset
            if error is None:
                last_offset = written.offset()
            else:
                undelivered.append(error)

        messages = split(messages)
        try:
            self._producer.begin_transaction()
            for message in messages[:-1]:
                produce(self._producer, self._prefix, message)
            # Only the last message has a delivery report: one costs more than a message does.
            for message in messages[-1:]:
                produce(self._producer, self._prefix, message, on_delivery)
            self._producer.commit_transaction(commit_limit_s(messages))
        except KafkaException as exception:
            topics = {message.topic for message in messages}
            self._raise_failed([exception.args[0], *undelivered], topics)
        return last_offset

    def commit_offsets(self, offsets: Offsets, wait: bool = True) -> bool:
        partitions = [
            KafkaTopicPartition(self._prefix + topic, partition, offset)
            for (topic, partition), offset in offsets.items()
        ]
        if not partitions:
            return True
        if not wait:
            return self._committer.send_if_answered(partitions)
        try:
            commit = partial(self._committer.send_and_wait, partitions)
            call_with_retries(commit, address_of(self._settings))
            return True
        except AccessDenied:
            self.close()
            group = f"{self._prefix}{self._identity}"
            raise access_denied(self._settings, f"commit offsets of group {group}") from None
        except StreamrlError as error:
            logger.warning(
                "%s: its offsets are not shown to lag tools for now: %s", self._identity, error
            )
            return False

    def close(self) -> None:
        # What a failed transaction left is aborted by the next producer of this identity.
        self._producer.purge()
        self._committer.close()

    def _raise_failed(self, errors: Sequence[KafkaError], topics: Collection[str]) -> NoReturn:
        first = errors[0]
        if KafkaError.TOPIC_AUTHORIZATION_FAILED in {error.code() for error in errors}:
            names = [self._prefix + topic for topic in sorted(topics)]
            forbidden = topics_without_write_access(self._settings, names) or names
            raise access_denied(self._settings, f"write to topic {' or '.join(forbidden)}")
        if first.code() in FENCED:
            raise Fenced(
                f"{self._identity}: another process with this identity has taken over; "
                "stop one of the two"
            )
        address = address_of(self._settings)
        if missing := self._missing_topic(topics):
            raise TopicMissing(
                f"topic {missing} that {self._identity} writes to is missing on {address}; "
                "create it with `streamrl topics apply RUN.yaml`"
            )
        raise TransactionFailed(
            f"{self._identity}: transaction failed on {address} ({first.str()}); "
            "it has left no trace, start again"
        )

    def _missing_topic(self, topics: Collection[str]) -> str:
        """The first of these topics that the broker, if it answers, does not have. librdkafka
        reports a missing topic as a mere time-out.
        """
        try:
            there = self._committer.list_topics()
        except KafkaException:
            return ""
        for topic in sorted(topics):
            if self._prefix + topic not in there:
                return self._prefix + topic
        return ""


class OffsetCommitter:
    """Commits consumer offsets of one group. It works around librdkafka's own waiting commit, which
    has no time limit: that looks for the group's coordinator for minutes (its issue 5456), waits
    for a broker that is silent (3740), and keeps others from the client meanwhile.
    """

    def __init__(self, settings: Mapping[str, Any], group: str) -> None:
        answers: list[KafkaError | None] = []
        self.answers = answers
        self.unanswered = 0
        own = {"group.id": group, "on_commit": lambda error, _: answers.append(error)}
        self.consumer = Consumer({**settings, **CONSUMER, **own})

    def send_if_answered(self, partitions: list[KafkaTopicPartition]) -> bool:
        """Send, and wait for nothing. Returns False when too many earlier commits have not been
        answered yet.
        """
        self._take_answers(0.0)  # librdkafka keeps them until somebody takes them
        return self.unanswered < MAX_UNANSWERED and self._send(partitions)

    def send_and_wait(self, partitions: list[KafkaTopicPartition]) -> None:
        """Send, and wait until this commit and those before it are answered."""
        self._send(partitions)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while self.unanswered:
            error = self._take_answers(COMMIT_POLL_S)
            if error is not None:
                raise KafkaException(error)
            if time.monotonic() >= deadline:
                raise KafkaException(
                    KafkaError(KafkaError._TIMED_OUT, f"no answer within {CALL_TIMEOUT_S:.0f} s")
                )

    def list_topics(self) -> Collection[str]:
        return self.consumer.list_topics(timeout=CALL_TIMEOUT_S).topics

    def close(self) -> None:
        """Give the last commit a moment to arrive. With a silent broker a consumer waits without
        end when it is closed (librdkafka 3740), and for most of a minute when it is dropped.
        """
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(LEAVE_S)

    def _close(self) -> None:
        # What was not committed is committed by the next life of the part.
        with contextlib.suppress(KafkaException):
            self.consumer.close()

    def _send(self, partitions: list[KafkaTopicPartition]) -> bool:
        try:
            self.consumer.commit(offsets=partitions, asynchronous=True)
        except KafkaException:
            return False
        self.unanswered += 1
        return True

    def _take_answers(self, timeout_s: float) -> KafkaError | None:
        """Take all answers that have come. Returns the error of the last answer, or an error that
        librdkafka reports of the group's coordinator.
        """
        error: KafkaError | None = None
        event = self.consumer.poll(timeout_s)
        while event is not None:  # each poll ends with the first error that it meets
            error = event.error() or error
            event = self.consumer.poll(0.0)
        answers = self.answers[:]
        self.answers.clear()
        self.unanswered -= len(answers)
        if error is None and answers:
            return answers[-1]
        return error


class KafkaProducer:
    def __init__(self, settings: Mapping[str, Any], prefix: str, durable: bool = False) -> None:
        self._settings = settings
        self._prefix = prefix
        own: dict[str, Any] = {"acks": "1", "message.timeout.ms": round(DELIVERY_LIMIT_S * 1000)}
        if durable:
            own |= {"acks": "all", "linger.ms": 0}
        self._producer = Producer({**settings, **PRODUCER, **own})
        self._denied_topic = ""
        self._is_closed = threading.Event()
        self._poller: threading.Thread | None = None

    def send(self, message: Message, on_written: OnWritten | None = None) -> None:
        pieces = split([message])
        on_delivery = self._on_delivery
        if on_written is not None:
            on_delivery = partial(self._report, on_written, len(pieces), [])
            self._start_poller()
        try:
            for piece in pieces:
                produce(self._producer, self._prefix, piece, on_delivery)
            if on_written is None:
                self._producer.poll(0)
        except KafkaException as exception:
            if exception.args[0].code() in DENIED:
                self._denied_topic = self._prefix + message.topic
            if on_written is not None:
                on_written(-1, -1)
        self._raise_denied()

    def flush(self, timeout_s: float = 5.0) -> None:
        left = self._producer.flush(timeout_s)
        if left:
            raise BrokerUnreachable(
                f"{left} messages could not be delivered to {address_of(self._settings)} "
                f"within {timeout_s:.0f} s; is the broker up?"
            )
        self._raise_denied()

    def close(self) -> None:
        self._producer.purge()
        self._is_closed.set()
        if self._poller is not None:
            self._poller.join()

    def _start_poller(self) -> None:
        """Take delivery reports on a thread as they come. Without it they are taken by the next
        `send` or `flush`, which is enough where nobody waits for them.
        """
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll, name="delivery", daemon=True)
            self._poller.start()

    def _poll(self) -> None:
        while not self._is_closed.is_set():
            self._producer.poll(DELIVERY_POLL_S)

    def _report(
        self,
        on_written: OnWritten,
        count: int,
        offsets: list[int],
        error: KafkaError | None,
        message: Any,
    ) -> None:
        """The delivery report of one of `count` messages that somebody waits for. `offsets`: of
        those that have been reported, -1 where one was not delivered.
        """
        self._on_delivery(error, message)
        offsets.append(message.offset() if error is None else -1)
        if len(offsets) < count:
            return
        if min(offsets) < 0:
            on_written(-1, -1)
        else:
            on_written(message.partition(), max(offsets))

    def _on_delivery(self, error: KafkaError | None, message: Any) -> None:
        """The delivery report of a message that nobody waits for: only a missing right is an error,
        because only that can never work.
        """
        if error is not None and error.code() in DENIED:
            self._denied_topic = message.topic()

    def _raise_denied(self) -> None:
        if self._denied_topic:
            raise access_denied(self._settings, f"write to topic {self._denied_topic}")


def commit_limit_s(messages: Sequence[Message]) -> float:
    """How long to wait for the commit of these messages. Most of them are still to be sent when it
    begins.
    """
    sending_s = sum(map(size_of, messages)) / MIN_BYTES_PER_S
    return min(CALL_TIMEOUT_S + sending_s, TRANSACTION_TIMEOUT_S - CALL_TIMEOUT_S)


def produce(
    producer: Producer,
    prefix: str,
    message: Message,
    on_delivery: Callable[[KafkaError | None, Any], None] | None = None,
    timestamp_ms: int = 0,  # 0: now
) -> None:
    """Hand one message to the producer's queue. While the queue is full, wait for it to drain."""
    topic = prefix + message.topic
    headers = list(message.headers)
    while True:
        try:
            producer.produce(
                topic,
                message.value,
                message.key,
                message.partition,
                on_delivery,
                timestamp=timestamp_ms,
                headers=headers,  # pyright: ignore[reportArgumentType]
            )
            return
        except BufferError:
            producer.poll(0.01)
