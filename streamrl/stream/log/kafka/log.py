"""The log on an Apache Kafka broker, through librdkafka: topics, readers and writers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from streamrl.stream.log.chunks import JoiningReader
from streamrl.stream.log.kafka.admin import (
    CALL_TIMEOUT_S,
    COMMON,
    Admin,
    access_denied,
    address_of,
    call_with_retries,
)
from streamrl.stream.log.kafka.offsets import OffsetClient
from streamrl.stream.log.kafka.producer import KafkaProducer
from streamrl.stream.log.kafka.reader import CONSUMER, KafkaReader
from streamrl.stream.log.kafka.writer import SETTLE_TIMEOUT_S, CommitWait, KafkaWriter
from streamrl.stream.log.protocol import Log, Offsets, Reader, TopicPartition, end_offset
from streamrl.system.errors import BrokerError, TopicMissing

ASKED_ONE_BY_ONE = 8  # topics


class KafkaLog(Log):
    """The topics of one run on a broker. `settings` are passed to librdkafka, and need
    `bootstrap.servers`.
    """

    def __init__(self, settings: Mapping[str, Any], run: str) -> None:
        self.settings = {**COMMON, **settings}
        self.prefix = f"{run}."
        self._admin = Admin(settings)
        self._commit_wait: CommitWait | None = None
        self._offset_client = OffsetClient(self.settings, self.prefix, self._check_partitions)

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
        return self._offset_client.beginning_offsets(partitions)

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return self._offset_client.end_offsets(partitions)

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        # librdkafka would report a missing topic only after half a minute.
        self._require({topic for topic, _ in offsets})
        reader = KafkaReader(self.settings, self.prefix, offsets, bounded)
        return JoiningReader(reader, offsets, self) if whole else reader

    def writer(self, identity: str, changelog_topic: str = "") -> KafkaWriter:
        if self._commit_wait is None:
            self._commit_wait = CommitWait(self._count_brokers())
        writer = KafkaWriter(self.settings, self.prefix, identity, self._commit_wait)
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

    def _count_brokers(self) -> int:
        metadata = call_with_retries(
            lambda: self._admin.list_topics(timeout=CALL_TIMEOUT_S), self.address
        )
        return len(metadata.brokers)

    def _wait_until_settled(self, topic: str, limit_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until everything in a topic is committed or aborted."""
        deadline = time.monotonic() + limit_s
        client = OffsetClient(
            self.settings, self.prefix, self._check_partitions, "read_uncommitted"
        )
        uncommitted = client.end_offsets([(topic, 0)])
        while (end := end_offset(self, topic, 0)) < uncommitted[topic, 0]:
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{self.prefix}{topic}[0]@{end} is neither committed nor aborted after "
                    f"{limit_s:.0f} s: {self.address} has lost the end of a transaction; "
                    "`kafka-transactions.sh find-hanging` names it"
                )
            time.sleep(0.01)

    def _without_prefix(self, tp: KafkaTopicPartition) -> TopicPartition:
        return tp.topic.removeprefix(self.prefix), tp.partition

    def _require(self, topics: Collection[str]) -> None:
        """Raise TopicMissing or AccessDenied unless this client sees all of the topics."""
        missing = set(topics) - self._partition_counts(topics).keys()
        if missing:
            self._raise_missing(missing)

    def _check_partitions(self, partitions: Collection[TopicPartition]) -> None:
        """Raise TopicMissing or AccessDenied unless this client sees all of the partitions."""
        counts = self._partition_counts({topic for topic, _ in partitions})
        missing = {topic for topic, partition in partitions if partition >= counts.get(topic, 0)}
        if missing:
            self._raise_missing(missing)

    def _partition_counts(self, topics: Collection[str]) -> dict[str, int]:
        """The number of partitions of those of these topics that this client sees.

        Few of them are asked for one by one, since the list of all topics may have thousands.
        """
        if len(topics) > ASKED_ONE_BY_ONE:
            return self.topics()
        asked = {topic: self._admin.topic_metadata(self.prefix + topic) for topic in topics}
        return {topic: len(of.partitions) for topic, of in asked.items() if of.error is None}

    def _raise_missing(self, missing: Collection[str]) -> NoReturn:
        name = self.prefix + min(missing)
        error = self._admin.topic_metadata(name).error
        if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise access_denied(self.settings, f"read topic {name}")
        raise TopicMissing(
            f"topic {name} is missing on {self.address}; "
            "create it with `streamrl topics apply RUN.yaml`"
        )
