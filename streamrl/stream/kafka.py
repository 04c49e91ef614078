"""The log on an Apache Kafka broker, through librdkafka. Nothing else knows Kafka, but `broker.py` (runs one) and `topics.py` (makes topics).

Settings below that matter were measured: `retry.backoff.ms` 1 makes a transaction 5 ms instead of 105, `fetch.queue.backoff.ms` 5 and 1 MB batches
double the throughput. Crash-only: a transactional call that fails once ends the process; one that retries after a broker's death hangs for minutes.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin passes its names on without saying so

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from streamrl.errors import BrokerError, BrokerUnreachable, Fenced, InputGone, TopicMissing, TransactionFailed
from streamrl.stream.log import Log, Message, Positions
from streamrl.stream.log import TopicPartition as Where

logger = logging.getLogger(__name__)
T = TypeVar("T")

CALL_TIMEOUT_S = 3.0  # of one call to the broker; the process leaves, or the call is made again
START_TIMEOUT_S = 10.0  # for calls at start, made again until then: a broker may still be recovering
MAX_MESSAGE_BYTES = 8 * 1024 * 1024

COMMON = {"log_level": 0, "socket.timeout.ms": 5_000, "reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 500}
CONSUMER = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "auto.offset.reset": "error",  # an offset that is gone is an error, not a silent jump
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 10,
    "fetch.queue.backoff.ms": 5,
    "fetch.message.max.bytes": 4_000_000,
}
PRODUCER = {
    "partitioner": "murmur2_random",  # what Java and kafka-python clients use: the same key goes to the same partition
    "linger.ms": 5,
    "batch.size": 1_000_000,
    "message.max.bytes": MAX_MESSAGE_BYTES,
    "queue.buffering.max.kbytes": 512_000,
    "retry.backoff.ms": 1,
    "retry.backoff.max.ms": 10,
}
TRANSACTIONAL = {"transaction.timeout.ms": 10_000, "message.timeout.ms": 8_000, "socket.timeout.ms": 3_000}

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
_EARLIEST, _LATEST = cast(OffsetSpec, OffsetSpec.earliest()), cast(OffsetSpec, OffsetSpec.latest())
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}


class KafkaLog:
    """The topics of one run on a broker. `settings` are librdkafka's and pass through; `bootstrap.servers` is needed."""

    def __init__(self, settings: Mapping[str, Any], run: str) -> None:
        self._settings = {**COMMON, **settings}
        self._prefix = f"{run}."
        self._admin = AdminClient(self._settings)

    @property
    def address(self) -> str:
        return str(self._settings.get("bootstrap.servers"))

    def topics(self) -> dict[str, int]:
        metadata = again(lambda: self._admin.list_topics(timeout=CALL_TIMEOUT_S), self.address)
        return {name.removeprefix(self._prefix): len(topic.partitions) for name, topic in metadata.topics.items() if name.startswith(self._prefix)}

    def start(self, topic: str, partition: int) -> int:
        return self._offset(topic, partition, _EARLIEST)

    def end(self, topic: str, partition: int) -> int:
        return self._offset(topic, partition, _LATEST)

    def reader(self, positions: Positions) -> KafkaReader:
        self._require({topic for topic, _ in positions})  # librdkafka itself would say so after half a minute
        return KafkaReader(self._settings, self._prefix, positions)

    def writer(self, identity: str) -> KafkaWriter:
        return KafkaWriter(self._settings, self._prefix, identity)

    def plain_writer(self) -> KafkaPlainWriter:
        return KafkaPlainWriter(self._settings, self._prefix)

    def committed(self, identity: str) -> dict[Where, int]:
        consumer = Consumer({**self._settings, **CONSUMER, "group.id": self._prefix + identity})
        try:
            asked = [TopicPartition(self._prefix + t, p) for t, n in self.topics().items() for p in range(n)]
            found = again(lambda: consumer.committed(asked, timeout=CALL_TIMEOUT_S), self.address)
            return {(tp.topic.removeprefix(self._prefix), tp.partition): tp.offset for tp in found if tp.offset >= 0}
        finally:
            consumer.close()

    def close(self) -> None: ...

    def _offset(self, topic: str, partition: int, which: OffsetSpec) -> int:
        where = TopicPartition(self._prefix + topic, partition)

        def ask() -> int:
            futures = self._admin.list_offsets({where: which}, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=CALL_TIMEOUT_S)
            return int(futures[where].result().offset)

        try:
            return again(ask, self.address)
        except BrokerError:
            self._require({topic})  # librdkafka only says that it has found no leader
            raise

    def _require(self, topics: Collection[str]) -> None:
        if missing := set(topics) - self.topics().keys():
            raise TopicMissing(f"topic {self._prefix}{min(missing)} is missing on {self.address}; create it with `streamrl topics apply RUN.yaml`")


class KafkaReader:
    def __init__(self, settings: Mapping[str, Any], prefix: str, positions: Positions) -> None:
        self._prefix, self._address = prefix, str(settings.get("bootstrap.servers"))
        self._consumer = Consumer({**settings, **CONSUMER, "group.id": prefix + "reader"})
        self._consumer.assign([TopicPartition(prefix + t, p, offset) for (t, p), offset in positions.items()])
        self._positions = dict(positions)
        self._paused = frozenset[str]()

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        found: list[Message] = []
        for raw in self._consumer.consume(max_messages, timeout_s):
            topic, partition, offset = str(raw.topic()).removeprefix(self._prefix), cast(int, raw.partition()), cast(int, raw.offset())
            error = raw.error()
            if error is None:
                self._positions[topic, partition] = offset + 1
                headers = tuple((name, cast(bytes, value or b"")) for name, value in raw.headers() or ())
                found.append(Message(topic, raw.key(), raw.value(), headers, partition, offset, raw.timestamp()[1] / 1000))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._positions[topic, partition] = max(self._positions[topic, partition], offset)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                gone = f"{topic}[{partition}] no longer has offset {self._positions[topic, partition]}"
                raise InputGone(f"{gone}: retention has removed it; lengthen topics.retention_hours")
            elif error.code() in _MISSING:
                raise TopicMissing(f"topic {raw.topic()} is missing on {self._address}; create it with `streamrl topics apply RUN.yaml`")
            elif error.code() not in _AGAIN:
                raise BrokerError(f"reading {raw.topic()} from {self._address}: {error.str()}")
        return found

    def position(self, topic: str, partition: int) -> int:
        return self._positions[topic, partition]

    def pause(self, topics: Collection[str]) -> None:
        wanted = frozenset(topics)
        for action, names in ((self._consumer.pause, wanted - self._paused), (self._consumer.resume, self._paused - wanted)):
            if where := [TopicPartition(self._prefix + t, p) for t, p in self._positions if t in names]:
                action(where)
        self._paused = wanted

    def close(self) -> None:
        self._consumer.close()


class KafkaWriter:
    """One transactional producer. It is gone after its first failure: the process ends, and its successor aborts what was left open."""

    def __init__(self, settings: Mapping[str, Any], prefix: str, identity: str) -> None:
        self._prefix, self._identity, self._address = prefix, identity, str(settings.get("bootstrap.servers"))
        name = prefix + identity
        self._producer = Producer({**settings, **PRODUCER, **TRANSACTIONAL, "transactional.id": name})
        # Only for its group's metadata: positions are committed under the part's name, where ordinary lag tools look.
        self._group = Consumer({**settings, **CONSUMER, "group.id": name})
        again(lambda: self._producer.init_transactions(CALL_TIMEOUT_S), self._address)

    def commit(self, messages: Sequence[Message], positions: Positions | None = None) -> list[int]:
        offsets = [-1] * len(messages)
        try:
            self._producer.begin_transaction()
            for index, message in enumerate(messages):
                produce(self._producer, self._prefix, message, partial(_note_offset, offsets, index))
            if positions:
                where = [TopicPartition(self._prefix + t, p, offset) for (t, p), offset in positions.items()]
                self._producer.send_offsets_to_transaction(where, self._group.consumer_group_metadata(), CALL_TIMEOUT_S)
            self._producer.commit_transaction(CALL_TIMEOUT_S)
        except KafkaException as exception:
            self._fail(exception.args[0], {message.topic for message in messages})
        return offsets

    def close(self) -> None:
        self._group.close()

    def _fail(self, error: KafkaError, topics: Collection[str]) -> NoReturn:
        if error.code() in _FENCED:
            raise Fenced(f"{self._identity}: another process with this identity has taken over; stop one of the two")
        if missing := self._missing(topics):
            raise TopicMissing(
                f"topic {missing} that {self._identity} writes to is missing on {self._address}; create it with `streamrl topics apply RUN.yaml`"
            )
        raise TransactionFailed(f"{self._identity}: transaction failed on {self._address} ({error.str()}); it has left no trace, start again")

    def _missing(self, topics: Collection[str]) -> str:
        """The first of these topics that the broker, if it answers, does not have: librdkafka reports one as a time-out only."""
        try:
            there = self._group.list_topics(timeout=CALL_TIMEOUT_S).topics
        except KafkaException:
            return ""
        return next((self._prefix + topic for topic in sorted(topics) if self._prefix + topic not in there), "")


class KafkaPlainWriter:
    def __init__(self, settings: Mapping[str, Any], prefix: str) -> None:
        self._prefix, self._address = prefix, str(settings.get("bootstrap.servers"))
        self._producer = Producer({**settings, **PRODUCER, "acks": "1", "message.timeout.ms": 30_000})

    def send(self, message: Message) -> None:
        produce(self._producer, self._prefix, message)

    def flush(self, timeout_s: float = 5.0) -> None:
        if left := self._producer.flush(timeout_s):
            raise BrokerUnreachable(f"{left} messages could not be delivered to {self._address} within {timeout_s:.0f} s; is the broker up?")

    def close(self) -> None:
        self._producer.purge()


def produce(producer: Producer, prefix: str, message: Message, on_delivery: Callable[[KafkaError | None, Any], None] | None = None) -> None:
    """Hand one message to the producer's queue; while that is full, wait for it to drain."""
    arguments: dict[str, Any] = {"value": message.value, "key": message.key, "headers": list(message.headers)}
    if message.partition >= 0:
        arguments["partition"] = message.partition
    if on_delivery is not None:
        arguments["on_delivery"] = on_delivery
    while True:
        try:
            producer.produce(prefix + message.topic, **arguments)
            producer.poll(0)
            return
        except BufferError:
            producer.poll(0.01)


def again(call: Callable[[], T], address: str, timeout_s: float = START_TIMEOUT_S) -> T:
    """Make a call that a starting or recovering broker may refuse, until it succeeds or `timeout_s` is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() in _FENCED:
                raise Fenced("another process with this identity has taken over; stop one of the two") from None
            if error.code() in _MISSING:
                raise TopicMissing(f"{error.str()} on {address}; create the topics with `streamrl topics apply RUN.yaml`") from None
            if error.code() not in _AGAIN and not error.retriable():
                raise BrokerError(f"{address}: {error.str()}") from None
            if time.monotonic() >= deadline:
                raise BrokerUnreachable(
                    f"no Kafka broker answers at {address} ({error.str()}); start one with `streamrl broker RUN.yaml` or name yours in STREAMRL_KAFKA"
                ) from None
            logger.debug("%s: %s: again", address, error.str())
            time.sleep(0.05)


def _note_offset(offsets: list[int], index: int, error: KafkaError | None, message: Any) -> None:
    if error is None:
        offsets[index] = message.offset()


def _check(log: KafkaLog) -> Log:  # pyright: ignore[reportUnusedFunction]
    return log  # the type checker holds KafkaLog to the protocol here
