"""The log on an Apache Kafka broker, through librdkafka: topics, readers and writers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, cast

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import OffsetSpec  # pyright: ignore[reportPrivateImportUsage]

from streamrl.errors import BrokerError, TopicMissing
from streamrl.log.chunks import JoiningReader
from streamrl.log.kafka_admin import (
    CALL_TIMEOUT_S,
    COMMON,
    Admin,
    access_denied,
    address_of,
    call_with_retries,
)
from streamrl.log.kafka_producer import KafkaProducer
from streamrl.log.kafka_reader import CONSUMER, KafkaReader
from streamrl.log.kafka_writer import SETTLE_TIMEOUT_S, KafkaWriter
from streamrl.log.protocol import Log, Offsets, Reader, TopicPartition, end_offset

# The leader that librdkafka knows of is not that of today.
LEADER_GONE = {
    KafkaError._NOENT,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_LEADER_FOR_PARTITION,
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
            committed = consumer.committed(asked, timeout=CALL_TIMEOUT_S)
            for tp in committed:
                if tp.error is not None:
                    raise KafkaException(tp.error)
            return committed

        try:
            committed = call_with_retries(ask, self.address)
            return {self._without_prefix(tp): tp.offset for tp in committed if tp.offset >= 0}
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
                if exception.args[0].code() not in LEADER_GONE:
                    raise
                # librdkafka says no more than that it has found no leader, or asks for as long as
                # 15 minutes with the epoch of a leader of before. This asks for today's.
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
