"""Reads partitions of a run on a Kafka broker: what is committed, in the order of the offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError
from confluent_kafka import TopicPartition as KafkaTopicPartition

from streamrl.errors import BrokerError, InputGone, TopicMissing
from streamrl.log.kafka_admin import DENIED, MISSING, RETRIABLE, access_denied, address_of
from streamrl.log.protocol import Message, Offsets

# A broker keeps a fetch that finds nothing for so long. Only then a bounded reader learns that the
# end is reached.
BOUNDED_WAIT_MS = 10
# The same for a reader that follows. A new record is sent at once, but a partition that is resumed
# waits for as long.
IDLE_WAIT_MS = 100
# Fetches of 4 MB that follow each other after 5 ms double the throughput (measured).
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
READER = "reader"  # the consumer group that readers name; they never commit offsets


class KafkaReader:
    def __init__(
        self, settings: Mapping[str, Any], prefix: str, offsets: Offsets, bounded: bool = False
    ) -> None:
        self._settings = settings
        self._prefix = prefix
        self._offsets = dict(offsets)
        self._topics = {prefix + topic: topic for topic, _ in offsets}
        self._paused = frozenset[str]()
        self._bounded = bounded
        self._ended: list[KafkaTopicPartition] = []  # paused until the next poll
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
        ended = [tp for tp in self._ended if self._topics[tp.topic] not in self._paused]
        if ended:
            self._consumer.resume(ended)
        self._ended = []
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
            if self._bounded:
                # A replay has a reader for every partition of every env. Those at the end would ask
                # for more every BOUNDED_WAIT_MS while another one is read.
                ended = KafkaTopicPartition(raw.topic(), raw.partition())
                self._consumer.pause([ended])
                self._ended.append(ended)
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
        pause = self._partitions_of(wanted - self._paused)
        if pause:
            self._consumer.pause(pause)
        resume = self._partitions_of(self._paused - wanted)
        if resume:
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
