"""The log on an Apache Kafka broker, through librdkafka. Nothing else knows Kafka, but `broker.py`
(runs one) and `topics.py` (makes topics).

Settings below that matter were measured: `retry.backoff.ms` 1 makes a transaction 5 ms instead of
105, `fetch.queue.backoff.ms` 5 and 1 MB batches double the throughput. Crash-only: a transactional
call that fails once ends the process; one that retries after a broker's death hangs for minutes.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin passes its names on without saying so

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AclOperation, AdminClient, OffsetSpec

from streamrl.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnreachable,
    ConfigError,
    Fenced,
    InputGone,
    StreamrlError,
    TopicMissing,
    TransactionFailed,
)
from streamrl.log.chunks import JoiningReader, size_of, split
from streamrl.log.offsets import WriteOp
from streamrl.log.protocol import Log, Message, Offsets, Reader, end_offset
from streamrl.log.protocol import TopicPartition as Where

logger = logging.getLogger(__name__)
T = TypeVar("T")

CALL_TIMEOUT_S = 3.0  # of one call to the broker; the process leaves, or the call is made again
IMPORT_TIMEOUT_S = 30.0  # for calls of an import: it writes as fast as the broker takes it
# then the broker aborts it: the largest one that is written at RATE_BYTES_PER_S has half a gigabyte
TRANSACTION_TIMEOUT_S = 60.0
RATE_BYTES_PER_S = 10_000_000  # a broker that takes less of a transaction is not waited for
# for an open transaction of somebody else who has died
SETTLE_TIMEOUT_S = TRANSACTION_TIMEOUT_S + 15.0
MARK_POLL_S = 0.005  # librdkafka tells of an answer when the look for it is over
# marks: a broker that is silent is not sent any more of them, and what it would answer takes no
# memory
MAX_UNANSWERED = 8
LEAVE_S = 1.0  # for the last mark to arrive, when a part ends
# for calls at start, made again until then: a broker may still be recovering
START_TIMEOUT_S = 10.0
# what topics take, and what a dead letter says of a record that is as large as that
MAX_MESSAGE_BYTES = 8 * 1024 * 1024 + 65_536

# for which a broker keeps a fetch that finds nothing: only then it says that the end is reached
BOUNDED_WAIT_MS = 10
# the same of a reader that follows: a new record is sent at once, but a partition that is resumed
# waits for as long
IDLE_WAIT_MS = 100

COMMON = {
    "log_level": 0,
    "socket.timeout.ms": 5_000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
}
CONSUMER = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "auto.offset.reset": "error",  # an offset that is gone is an error, not a silent jump
    "enable.partition.eof": True,
    "fetch.queue.backoff.ms": 5,
    "fetch.message.max.bytes": 4_000_000,
    # ahead of the reader, by default 64 MB: a replay has a reader for every partition
    "queued.max.messages.kbytes": 16_000,
}
PRODUCER = {
    # what Java and kafka-python clients use: the same key goes to the same partition
    "partitioner": "murmur2_random",
    "linger.ms": 5,
    # a transaction in one: with more, an idempotent producer spins between them (16 us a rollout
    # instead of 6)
    "batch.size": 4_000_000,
    "message.max.bytes": MAX_MESSAGE_BYTES,
    "queue.buffering.max.kbytes": 512_000,
    "retry.backoff.ms": 1,
    "retry.backoff.max.ms": 10,
}
READER = "reader"  # the group that readers name; they never commit
TRANSACTIONAL = {
    "transaction.timeout.ms": round(TRANSACTION_TIMEOUT_S * 1000),
    "message.timeout.ms": round(TRANSACTION_TIMEOUT_S * 1000),  # none: `commit_limit_s` is shorter
    "socket.timeout.ms": 3_000,
    # forgets who coordinates a group, which librdkafka else believes long after that broker has
    # died, and waits for it
    "metadata.max.age.ms": 2_000,
}

_AGAIN = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._WAIT_COORD,
}
_FENCED = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}
_EARLIEST, _LATEST = cast(OffsetSpec, OffsetSpec.earliest()), cast(OffsetSpec, OffsetSpec.latest())
_MISSING = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}


class Admin(AdminClient):
    """Knows why nobody answers: that a password or a certificate is not accepted, librdkafka says
    to `error_cb` only.

    Raises ConfigError for settings that librdkafka does not take.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.address, self._refusal = str(settings.get("bootstrap.servers")), ""
        conf: dict[str, Any] = {**COMMON, **settings, "error_cb": self._hear}
        try:
            super().__init__(conf)
        except KafkaException as exception:
            raise ConfigError(
                f"kafka: librdkafka does not take these settings: {exception.args[0].str()}"
            ) from None

    def visible_topics(self, timeout_s: float = START_TIMEOUT_S) -> Mapping[str, Any]:
        """Metadata of all topics that this user may see. Raises BrokerUnreachable, or AccessDenied
        when the two do not accept each other.
        """
        try:
            return call_with_retries(
                lambda: self.list_topics(timeout=CALL_TIMEOUT_S), self.address, timeout_s
            ).topics
        except BrokerUnreachable:
            self.poll(0)
            if self._refusal:
                raise AccessDenied(
                    f"this client and the broker do not accept each other: {self._refusal}; see `kafka` in the run file"
                ) from None
            raise

    def _hear(self, error: KafkaError) -> None:
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL):
            self._refusal = error.str()


class KafkaLog(Log):
    """The topics of one run on a broker. `settings` are librdkafka's and pass through;
    `bootstrap.servers` is needed.
    """

    def __init__(self, settings: Mapping[str, Any], run: str) -> None:
        self._settings = {**COMMON, **settings}
        self._prefix = f"{run}."
        self._admin = Admin(settings)

    @property
    def address(self) -> str:
        return str(self._settings.get("bootstrap.servers"))

    def topics(self) -> dict[str, int]:
        return {
            name.removeprefix(self._prefix): len(topic.partitions)
            for name, topic in self._admin.visible_topics().items()
            if name.startswith(self._prefix)
        }

    def beginning_offsets(self, partitions: Collection[Where]) -> dict[Where, int]:
        return self._offsets(partitions, _EARLIEST)

    def end_offsets(self, partitions: Collection[Where]) -> dict[Where, int]:
        return self._offsets(partitions, _LATEST)

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        # librdkafka itself would say so after half a minute
        self._require({topic for topic, _ in offsets})
        reader = KafkaReader(self._settings, self._prefix, offsets, bounded)
        return JoiningReader(reader, offsets, self) if whole else reader

    def writer(self, identity: str, changelog_topic: str = "") -> KafkaWriter:
        writer = KafkaWriter(self._settings, self._prefix, identity)
        if changelog_topic:
            self._settle(changelog_topic)
        return writer

    def _settle(self, topic: str, limit_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until whatever lies in a topic is committed or aborted."""
        deadline = time.monotonic() + limit_s
        uncommitted = IsolationLevel.READ_UNCOMMITTED
        wanted = self._offsets([(topic, 0)], _LATEST, uncommitted)[topic, 0]
        while (end := end_offset(self, topic, 0)) < wanted:
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{self._prefix}{topic}[0]@{end} is neither committed nor aborted after {limit_s:.0f} s: {self.address} has lost the end of a "
                    "transaction; `kafka-transactions.sh find-hanging` names it"
                )
            time.sleep(0.01)

    def producer(self) -> KafkaProducer:
        return KafkaProducer(self._settings, self._prefix)

    def committed_offsets(self, identity: str) -> dict[Where, int]:
        consumer = Consumer({**self._settings, **CONSUMER, "group.id": self._prefix + identity})
        try:
            asked = [
                TopicPartition(self._prefix + t, p)
                for t, n in self.topics().items()
                for p in range(n)
            ]
            found = call_with_retries(
                lambda: consumer.committed(asked, timeout=CALL_TIMEOUT_S), self.address
            )
            return {
                (tp.topic.removeprefix(self._prefix), tp.partition): tp.offset
                for tp in found
                if tp.offset >= 0
            }
        finally:
            consumer.close()

    def offset_preserving_writer(self) -> OffsetPreservingWriter:
        """What writes a recorded run into the run's topics, which must be empty and nobody else's.
        Not part of the protocol.
        """
        return OffsetPreservingWriter(self, self._settings, self._prefix)

    def delete_before(self, starts: Mapping[Where, int]) -> None:
        """Delete the records of each partition below an offset, as retention would."""
        asked = [
            TopicPartition(self._prefix + topic, p, offset)
            for (topic, p), offset in starts.items()
            if offset
        ]

        def order() -> None:
            for future in self._admin.delete_records(
                asked, request_timeout=CALL_TIMEOUT_S
            ).values():
                future.result()

        if asked:
            call_with_retries(order, self.address)

    def close(self) -> None: ...

    def _offsets(
        self,
        partitions: Collection[Where],
        which: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[Where, int]:
        if not partitions:
            return {}
        asked: Any = {
            TopicPartition(self._prefix + topic, partition): which
            for topic, partition in partitions
        }

        def ask() -> dict[Where, int]:
            futures = self._admin.list_offsets(
                asked, isolation_level=isolation, request_timeout=CALL_TIMEOUT_S
            )
            return {
                (tp.topic.removeprefix(self._prefix), tp.partition): int(future.result().offset)
                for tp, future in futures.items()
            }

        try:
            return call_with_retries(ask, self.address)
        except BrokerError:
            # librdkafka says no more than that it has found no leader.
            self._require({topic for topic, _ in partitions})
            raise

    def _require(self, topics: Collection[str]) -> None:
        if missing := set(topics) - self.topics().keys():
            name = self._prefix + min(missing)
            asked = call_with_retries(
                lambda: self._admin.list_topics(name, timeout=CALL_TIMEOUT_S), self.address
            ).topics[name]
            if (
                asked.error is not None
                and asked.error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
            ):
                raise access_denied(self._settings, f"read topic {name}")
            raise TopicMissing(
                f"topic {name} is missing on {self.address}; create it with `streamrl topics apply RUN.yaml`"
            )


class KafkaReader:
    def __init__(
        self, settings: Mapping[str, Any], prefix: str, offsets: Offsets, bounded: bool = False
    ) -> None:
        self._prefix, self._settings, self._address = (
            prefix,
            settings,
            str(settings.get("bootstrap.servers")),
        )
        wait_ms = BOUNDED_WAIT_MS if bounded else IDLE_WAIT_MS
        self._consumer = Consumer(
            {**settings, **CONSUMER, "group.id": prefix + READER, "fetch.wait.max.ms": wait_ms}
        )
        self._consumer.assign(
            [TopicPartition(prefix + t, p, offset) for (t, p), offset in offsets.items()]
        )
        self._positions, self._names = (
            dict(offsets),
            {prefix + topic: topic for topic, _ in offsets},
        )
        self._paused = frozenset[str]()

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        found: list[Message] = []
        raw: Any  # the stubs say that each of its parts may be missing
        for raw in self._consumer.consume(max_messages, timeout_s):
            partition, offset, error = raw.partition(), raw.offset(), raw.error()
            topic = self._names.get(raw.topic(), "")  # an error of the group has no topic
            if error is None:
                self._positions[topic, partition] = offset + 1
                headers = tuple([(name, value or b"") for name, value in raw.headers() or ()])
                found.append(
                    Message(
                        topic,
                        raw.key(),
                        raw.value(),
                        headers,
                        partition,
                        offset,
                        raw.timestamp()[1] / 1000,
                    )
                )
            elif error.code() == KafkaError._PARTITION_EOF:
                self._positions[topic, partition] = max(self._positions[topic, partition], offset)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                gone = (
                    f"{topic}[{partition}] no longer has offset {self._positions[topic, partition]}"
                )
                raise InputGone(
                    f"{gone}: retention has removed it; lengthen topics.retention_hours"
                )
            elif error.code() in _MISSING:
                raise TopicMissing(
                    f"topic {raw.topic()} is missing on {self._address}; create it with `streamrl topics apply RUN.yaml`"
                )
            elif error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                raise access_denied(self._settings, f"use group {self._prefix}{READER}")
            elif error.code() in _DENIED:
                raise access_denied(self._settings, f"read topic {raw.topic()}")
            elif error.code() not in _AGAIN:
                raise BrokerError(f"reading {raw.topic()} from {self._address}: {error.str()}")
        return found

    def position(self, topic: str, partition: int) -> int:
        return self._positions[topic, partition]

    def set_paused(self, topics: Collection[str]) -> None:
        wanted = frozenset(topics)
        for action, names in (
            (self._consumer.pause, wanted - self._paused),
            (self._consumer.resume, self._paused - wanted),
        ):
            if where := [
                TopicPartition(self._prefix + t, p) for t, p in self._positions if t in names
            ]:
                action(where)
        self._paused = wanted

    def close(self) -> None:
        self._consumer.close()


class KafkaWriter:
    """One transactional producer. It is gone after its first failure: the process ends, and its
    successor aborts what was left open.
    """

    def __init__(self, settings: Mapping[str, Any], prefix: str, identity: str) -> None:
        self._prefix, self._identity, self._settings, self._address = (
            prefix,
            identity,
            settings,
            str(settings.get("bootstrap.servers")),
        )
        name = prefix + identity
        self._producer = Producer(
            {**settings, **PRODUCER, **TRANSACTIONAL, "transactional.id": name}
        )
        # Positions are marked under the part's name, where ordinary lag tools look. In a
        # transaction they would cost two requests and a marker.
        answers: list[KafkaError | None] = []
        self._answers, self._unanswered = answers, 0
        self._group = Consumer(
            {
                **settings,
                **CONSUMER,
                "group.id": name,
                "on_commit": lambda error, _: answers.append(error),
            }
        )
        try:
            self._take_identity()
        except AccessDenied:
            raise access_denied(settings, f"write as transactional id {name}") from None

    def _take_identity(self) -> None:
        """Fence whoever had this identity. The broker first ends a transaction that he has left
        open: as long as a broker answers at all, that is waited for.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            try:
                call_with_retries(
                    lambda: self._producer.init_transactions(CALL_TIMEOUT_S),
                    self._address,
                    START_TIMEOUT_S,
                )
                return
            except BrokerUnreachable:
                if time.monotonic() >= deadline or not self._is_answered():
                    raise

    def _is_answered(self) -> bool:
        try:
            self._producer.list_topics(timeout=CALL_TIMEOUT_S)
            return True
        except KafkaException:
            return False

    def commit(self, messages: Sequence[Message]) -> int:
        last, undelivered = [-1], list[KafkaError]()
        messages = split(messages)
        try:
            self._producer.begin_transaction()
            for message in messages[:-1]:
                produce(self._producer, self._prefix, message)
            # asked for every message, a report would cost more than the message
            for message in messages[-1:]:
                produce(self._producer, self._prefix, message, partial(_note, last, undelivered))
            self._producer.commit_transaction(commit_limit_s(messages))
        except KafkaException as exception:
            self._fail([exception.args[0], *undelivered], {message.topic for message in messages})
        return last[0]

    def commit_offsets(self, offsets: Offsets, wait: bool = True) -> bool:
        where = [TopicPartition(self._prefix + t, p, offset) for (t, p), offset in offsets.items()]
        if not where:
            return True
        if not wait:
            self._hear(0.0)  # the answers before it: they are kept until somebody takes them
            return self._send(where) if self._unanswered < MAX_UNANSWERED else False
        try:
            call_with_retries(partial(self._mark, where), self._address)
            return True
        except AccessDenied:
            self.close()
            raise access_denied(
                self._settings, f"commit offsets of group {self._prefix}{self._identity}"
            ) from None
        except StreamrlError as error:
            logger.warning(
                "%s: its positions are not shown to lag tools for now: %s", self._identity, error
            )
            return False

    def _mark(self, where: list[TopicPartition]) -> None:
        """Send, and wait until all is answered. librdkafka's own waiting commit has no time limit:
        it looks for who coordinates a group for minutes (its issue 5456), waits for a broker that
        is silent (3740), and nobody else may use the client meanwhile.
        """
        self._send(where)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while self._unanswered:
            if (error := self._hear(MARK_POLL_S)) is not None:
                raise KafkaException(error)
            if time.monotonic() >= deadline:
                raise KafkaException(
                    KafkaError(KafkaError._TIMED_OUT, f"no answer within {CALL_TIMEOUT_S:.0f} s")
                )

    def _send(self, where: list[TopicPartition]) -> bool:
        try:
            self._group.commit(offsets=where, asynchronous=True)
        except KafkaException:
            return False
        self._unanswered += 1
        return True

    def _hear(self, timeout_s: float) -> KafkaError | None:
        """Take all that has been answered to marks. Returns what the last answer objects to, or
        what is known of who coordinates the group.
        """
        error, said = None, self._group.poll(timeout_s)
        while said is not None:  # each look ends with the first error that it meets
            error, said = said.error() or error, self._group.poll(0.0)
        answers = self._answers[:]
        self._answers.clear()
        self._unanswered -= len(answers)
        return error or (answers[-1] if answers else None)

    def close(self) -> None:
        """Let what is marked arrive, if the broker takes it. With a silent one its client waits
        without end when it is closed (librdkafka 3740), and for most of a minute when it is
        dropped.
        """
        # of a failed transaction: the next producer of this identity aborts it
        self._producer.purge()
        leaving = threading.Thread(target=self._leave, daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)

    def _leave(self) -> None:
        # a position that is not marked is marked by the next life
        with contextlib.suppress(KafkaException):
            self._group.close()

    def _fail(self, errors: Sequence[KafkaError], topics: Collection[str]) -> NoReturn:
        error, codes = errors[0], {error.code() for error in errors}
        if KafkaError.TOPIC_AUTHORIZATION_FAILED in codes:
            names = [self._prefix + topic for topic in sorted(topics)]
            raise access_denied(
                self._settings,
                f"write to topic {' or '.join(topics_without_write_access(self._settings, names) or names)}",
            )
        if error.code() in _FENCED:
            raise Fenced(
                f"{self._identity}: another process with this identity has taken over; stop one of the two"
            )
        if missing := self._missing(topics):
            raise TopicMissing(
                f"topic {missing} that {self._identity} writes to is missing on {self._address}; create it with `streamrl topics apply RUN.yaml`"
            )
        raise TransactionFailed(
            f"{self._identity}: transaction failed on {self._address} ({error.str()}); it has left no trace, start again"
        )

    def _missing(self, topics: Collection[str]) -> str:
        """The first of these topics that the broker, if it answers, does not have: librdkafka
        reports one as a time-out only.
        """
        try:
            there = self._group.list_topics(timeout=CALL_TIMEOUT_S).topics
        except KafkaException:
            return ""
        return next(
            (self._prefix + topic for topic in sorted(topics) if self._prefix + topic not in there),
            "",
        )


class KafkaProducer:
    def __init__(self, settings: Mapping[str, Any], prefix: str) -> None:
        self._prefix, self._settings, self._address = (
            prefix,
            settings,
            str(settings.get("bootstrap.servers")),
        )
        self._producer = Producer(
            {**settings, **PRODUCER, "acks": "1", "message.timeout.ms": 30_000}
        )
        self._denied = ""  # a topic

    def send(self, message: Message) -> None:
        try:
            for piece in split([message]):
                produce(self._producer, self._prefix, piece, self._delivered)
            self._producer.poll(0)
        except KafkaException as exception:
            self._delivered(exception.args[0], None, message.topic)
        self._check()

    def flush(self, timeout_s: float = 5.0) -> None:
        if left := self._producer.flush(timeout_s):
            raise BrokerUnreachable(
                f"{left} messages could not be delivered to {self._address} within {timeout_s:.0f} s; is the broker up?"
            )
        self._check()

    def close(self) -> None:
        self._producer.purge()

    def _delivered(self, error: KafkaError | None, message: Any, topic: str = "") -> None:
        """Of what is not waited for, only what could never work is an error."""
        if error is not None and error.code() in _DENIED:
            self._denied = message.topic() if message else self._prefix + topic

    def _check(self) -> None:
        if self._denied:
            raise access_denied(self._settings, f"write to topic {self._denied}")


class OffsetPreservingWriter:
    """Writes recorded messages to empty partitions, each at its old offset and with its old time.
    Raises BrokerError when one lands elsewhere.
    """

    def __init__(self, log: KafkaLog, settings: Mapping[str, Any], prefix: str) -> None:
        self._log, self._prefix = log, prefix
        self._plain = Producer({**settings, **PRODUCER, "enable.idempotence": True})
        own = {
            "transactional.id": prefix + "import",
            "transaction.timeout.ms": 60_000,
            "message.timeout.ms": 30_000,
        }
        self._transactional = Producer({**settings, **PRODUCER, **own})
        call_with_retries(
            lambda: self._transactional.init_transactions(CALL_TIMEOUT_S), log.address
        )
        self._ends: dict[Where, int] = {}
        self._misplaced = ""

    def write(self, ops: Sequence[WriteOp]) -> None:
        """The next op of some partitions, each there once at most: what is plain, then one
        transaction that commits, then one that aborts.
        """
        try:
            plain = [op for op in ops if op.messages and not op.committed]
            for op in plain:
                # a marker may come after its transaction has ended; the next one of the same
                # producer waits for it
                self._settle(op.where)
            self._produce(self._plain, (message for op in plain for message in op.messages))
            if committed := [message for op in ops if op.committed for message in op.messages]:
                self._transactional.begin_transaction()
                self._produce(self._transactional, committed)
                self._transactional.commit_transaction(IMPORT_TIMEOUT_S)
            if any(op.gap > 1 for op in ops):
                self._transactional.begin_transaction()
                self._produce(
                    self._transactional, (message for op in ops for message in op.placeholders)
                )
                self._transactional.abort_transaction(IMPORT_TIMEOUT_S)
        except KafkaException as exception:
            raise BrokerError(
                f"writing to {self._log.address}: {exception.args[0].str()}"
            ) from None
        self._ends |= {op.where: op.end for op in ops}

    def settle(self) -> None:
        """Wait until all partitions end where they should."""
        for where in self._ends:
            self._settle(where)

    def _produce(self, producer: Producer, messages: Iterable[Message]) -> None:
        for message in messages:
            produce(
                producer,
                self._prefix,
                message,
                partial(self._check, message),
                round(message.timestamp_s * 1000),
            )
        if producer.flush(IMPORT_TIMEOUT_S):
            raise BrokerUnreachable(
                f"{self._log.address} has taken nothing for {IMPORT_TIMEOUT_S:.0f} s; is the broker up?"
            )
        if self._misplaced:
            raise BrokerError(self._misplaced)

    def _check(self, message: Message, error: KafkaError | None, written: Any) -> None:
        where = f"{message.topic}[{message.partition}]@{message.offset}"
        if error is not None:
            self._misplaced = f"{where} cannot be written to {self._log.address}: {error.str()}"
        elif written.offset() != message.offset:
            self._misplaced = f"{where} was written at offset {written.offset()}; does somebody else write to {self._prefix}{message.topic}?"

    def _settle(self, where: Where) -> None:
        """Wait until everything written to a partition shows there, markers included."""
        deadline, wanted = time.monotonic() + IMPORT_TIMEOUT_S, self._ends.get(where, 0)
        while (end := end_offset(self._log, *where)) < wanted:
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{where[0]}[{where[1]}] ends at {end} and not at {wanted}; does somebody else write to it?"
                )
            time.sleep(0.002)


def commit_limit_s(messages: Sequence[Message]) -> float:
    """For how long the commit of these messages, most of which are still to be sent then, is waited
    for.
    """
    return min(
        CALL_TIMEOUT_S + sum(map(size_of, messages)) / RATE_BYTES_PER_S,
        TRANSACTION_TIMEOUT_S - CALL_TIMEOUT_S,
    )


def produce(
    producer: Producer,
    prefix: str,
    message: Message,
    on_delivery: Callable[[KafkaError | None, Any], None] | None = None,
    timestamp_ms: int = 0,  # 0: now
) -> None:
    """Hand one message to the producer's queue; while that is full, wait for it to drain."""
    topic, headers = prefix + message.topic, list(message.headers)
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


def call_with_retries(call: Callable[[], T], address: str, timeout_s: float = START_TIMEOUT_S) -> T:
    """Make a call that a starting or recovering broker may refuse, until it succeeds or `timeout_s`
    is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() in _FENCED:
                raise Fenced(
                    "another process with this identity has taken over; stop one of the two"
                ) from None
            if error.code() in _MISSING:
                raise TopicMissing(
                    f"{error.str()} on {address}; create the topics with `streamrl topics apply RUN.yaml`"
                ) from None
            if error.code() in _DENIED:
                raise AccessDenied(
                    f"{address} refuses ({error.name()}); `streamrl topics acls RUN.yaml` lists what each role needs"
                ) from None
            if error.code() not in _AGAIN and not error.retriable():
                raise BrokerError(f"{address}: {error.str()}") from None
            if time.monotonic() >= deadline:
                raise BrokerUnreachable(
                    f"no Kafka broker answers at {address} ({error.str()}); start one with `streamrl broker RUN.yaml` or name yours in STREAMRL_KAFKA"
                ) from None
            logger.debug("%s: %s: again", address, error.str())
            time.sleep(0.05)


def access_denied(settings: Mapping[str, Any], what: str) -> AccessDenied:
    """`what`: the operation, and on what."""
    who = f"user {settings['sasl.username']!r}" if "sasl.username" in settings else "this client"
    return AccessDenied(
        f"{who} may not {what} on {settings.get('bootstrap.servers')}; `streamrl topics acls RUN.yaml` lists what each role needs"
    )


def topics_without_write_access(settings: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Those of the topics that the broker says we may not write to: an error of a transaction does
    not tell.
    """
    found, admin = list[str](), Admin(settings)  # kept: its requests end with it
    futures = admin.describe_topics(
        TopicCollection(list(names)),
        include_authorized_operations=True,
        request_timeout=CALL_TIMEOUT_S,
    )
    for name, future in futures.items():
        try:
            allowed = future.result().authorized_operations or ()
        except KafkaException:
            allowed = ()
        if AclOperation.WRITE not in allowed:
            found.append(name)
    return found


def _note(
    last: list[int], undelivered: list[KafkaError], error: KafkaError | None, message: Any
) -> None:
    if error is None:
        last[0] = message.offset()
    else:
        undelivered.append(error)
