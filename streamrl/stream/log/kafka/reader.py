"""Reads partitions of a run on a Kafka broker: what is committed, in the order of the offsets.

A record that librdkafka or its Python client cannot hand over is stepped over. A message with the
cause takes its place (`protocol.unreadable`), so that readers dead-letter it like any record that
they cannot decode. Of a batch that cannot be decompressed that is one message, at the offset of its
first record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from operator import methodcaller
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from streamrl.stream.log.kafka.admin import (
    CALL_TIMEOUT_S,
    DENIED,
    MISSING,
    RETRIABLE,
    access_denied,
    address_of,
)
from streamrl.stream.log.protocol import (
    Message,
    Offsets,
    TopicPartition,
    unreadable,
    unreadable_header,
)
from streamrl.system.errors import BrokerError, BrokerUnreachable, InputGone, TopicMissing

logger = logging.getLogger(__name__)

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
UNFETCHABLE = (KafkaError._BAD_COMPRESSION, KafkaError._BAD_MSG)
# A header is two or three objects for a reader, and a message has room for millions.
MAX_HEADERS = 1_000
PROBE_S = 10.0  # for a broker to answer whether an offset can be fetched
PROBE_BACKOFF_MS = 10  # after a fetch that failed; by default it is half a second

# Where the name of a header is not UTF-8, `raw.headers()` returns a list with holes and leaves an
# exception set. Python looks for that exception in a call from C only; in a loop that is hot it
# would use the list, which ends the process.
headers_of = methodcaller("headers")


class KafkaReader:
    def __init__(
        self, settings: Mapping[str, Any], prefix: str, offsets: Offsets, bounded: bool = False
    ) -> None:
        self._settings = settings
        self._prefix = prefix
        self._offsets = dict(offsets)
        self._topics = {prefix + topic: topic for topic, _ in offsets}
        self._reading = frozenset(offsets)
        # partitions of which something was fetched and not returned
        self._dropped = set[TopicPartition]()
        self._paused = frozenset[str]()
        self._bounded = bounded
        self._ended: list[KafkaTopicPartition] = []  # paused until the next poll
        # of the last batch of a partition that could not be fetched: its first offset, and the next
        # offset after it
        self._stepped_over: dict[TopicPartition, tuple[int, int]] = {}
        reading = {
            "group.id": prefix + READER,
            "fetch.wait.max.ms": BOUNDED_WAIT_MS if bounded else IDLE_WAIT_MS,
        }
        self._consumer = Consumer({**settings, **CONSUMER, **reading})
        self._consumer.assign(self._on_broker(offsets))

    def seek(self, offsets: Offsets) -> None:
        # A consumer that is assigned a topic that it does not know waits for a tenth of a second,
        # so all partitions stay assigned, and those that are not read are paused.
        self._consumer.pause(self._on_broker(self._reading - offsets.keys()))
        self._reading = frozenset(offsets)
        self._ended = []
        moved = {
            tp: offset
            for tp, offset in offsets.items()
            if offset != self._offsets[tp] or tp in self._dropped
        }
        self._dropped -= moved.keys()
        self._offsets.update(moved)
        self._consumer.resume(self._on_broker(offsets))
        for tp in self._on_broker(moved):
            self._seek(tp)

    def _seek(self, tp: KafkaTopicPartition) -> None:
        """Fetch the partition from its offset in `_offsets`. A partition that is only just assigned
        is in no state for it yet.
        """
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                self._consumer.seek(tp)
                return
            except KafkaException as exception:
                if exception.args[0].code() != KafkaError._STATE or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def _on_broker(self, partitions: Iterable[TopicPartition]) -> list[KafkaTopicPartition]:
        """These partitions with the offsets at which they are to be read."""
        return [
            KafkaTopicPartition(self._prefix + topic, partition, self._offsets[topic, partition])
            for topic, partition in partitions
        ]

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        ended = [tp for tp in self._ended if self._topics[tp.topic] not in self._paused]
        if ended:
            self._consumer.resume(ended)
        self._ended = []
        messages: list[Message] = []
        raw: Any  # in the stubs each of its parts may be missing
        for raw in self._consumer.consume(max_messages, timeout_s):
            tp = self._topics.get(raw.topic(), ""), raw.partition()
            if tp in self._offsets and tp not in self._reading:
                self._dropped.add(tp)  # it was fetched before `seek`
                continue
            if raw.error() is not None:
                in_its_place = self._on_error(raw)
                if in_its_place is not None:
                    messages.append(in_its_place)
                continue
            message = self._to_message(raw)
            self._offsets[message.topic, message.partition] = message.offset + 1
            messages.append(message)
        return messages

    def _to_message(self, raw: Any) -> Message:
        return Message(
            topic=self._topics[raw.topic()],
            key=raw.key(),
            value=raw.value(),
            headers=_headers(raw),
            partition=raw.partition(),
            offset=raw.offset(),
            timestamp_s=raw.timestamp()[1] / 1000,
        )

    def _on_error(self, raw: Any) -> Message | None:
        """Note that the end of a partition is reached, or raise. An error of the group has no
        topic. Returns the message that takes the place of records that cannot be fetched.
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
        elif error.code() in UNFETCHABLE:
            return self._step_over(tp, raw.offset(), error.str())
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise InputGone(
                f"{tp[0]}[{tp[1]}] no longer has offset {self._offsets[tp]}: retention has removed "
                "it, or the topic was deleted and made again; lengthen topics.retention_hours"
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

        return None

    def _step_over(self, tp: TopicPartition, base: int, cause: str) -> Message | None:
        """Continue after a batch that cannot be fetched, whose first record is at `base`. Returns
        the message in its place, or None if this reader began after its first record, or if the
        batch can be fetched after all.
        """
        first, next_offset = self._stepped_over.get(tp, (-1, -1))
        topic = self._prefix + tp[0]
        if first != base:
            next_offset = offset_after_batch(
                self._settings, self._prefix + READER, topic, tp[1], base
            )
            self._stepped_over[tp] = base, next_offset
        was = self._offsets[tp]
        self._offsets[tp] = max(was, next_offset)
        self._seek(*self._on_broker([tp]))
        if first == base or next_offset == base or was > base:
            return None
        logger.warning("%s[%d]@%d cannot be fetched: %s", topic, tp[1], base, cause)
        return unreadable(
            Message(tp[0], None, b"", partition=tp[1], offset=base),
            f"the batch of offsets {base} to {next_offset - 1} cannot be fetched: {cause}",
        )

    def position(self, topic: str, partition: int) -> int:
        return self._offsets[topic, partition]

    def set_paused(self, topics: Collection[str]) -> None:
        wanted = frozenset(topics)
        pause = wanted - self._paused
        self._consumer.pause(self._on_broker(tp for tp in self._reading if tp[0] in pause))
        resume = self._paused - wanted
        self._consumer.resume(self._on_broker(tp for tp in self._reading if tp[0] in resume))
        self._paused = wanted

    def close(self) -> None:
        self._consumer.close()


def _headers(raw: Any) -> tuple[tuple[str, bytes], ...]:
    """The headers of a message, or the one of a message that is unreadable because of them."""
    try:
        headers = headers_of(raw) or ()
    except SystemError:  # of the UnicodeDecodeError in the client's C code
        return unreadable_header("the name of a header is not UTF-8")
    if len(headers) > MAX_HEADERS:
        return unreadable_header(f"it has {len(headers):,} headers, more than {MAX_HEADERS}")
    return tuple([(name, value or b"") for name, value in headers])


def offset_after_batch(
    settings: Mapping[str, Any], group: str, topic: str, partition: int, base: int
) -> int:
    """The next offset after the batch that begins at `base` and cannot be fetched. `base` itself if
    it can be fetched.

    A broker answers a fetch from within a batch with the whole batch, and its length is not known
    to the client. So the offset is found by fetches from further and further on, and then from
    between the last two. Raises BrokerUnreachable.
    """
    own = {"group.id": group, "fetch.error.backoff.ms": PROBE_BACKOFF_MS}
    consumer = Consumer({**settings, **CONSUMER, **own})
    try:
        within = base
        after = base
        step = 1
        while _is_in_batch(consumer, topic, partition, after, base):
            within = after
            after += step
            step *= 2
        while after - within > 1:
            middle = (within + after) // 2
            if _is_in_batch(consumer, topic, partition, middle, base):
                within = middle
            else:
                after = middle
        return after
    finally:
        consumer.close()


def _is_in_batch(consumer: Consumer, topic: str, partition: int, offset: int, base: int) -> bool:
    """Whether a fetch from this offset fails because of the batch that begins at `base`."""
    consumer.assign([KafkaTopicPartition(topic, partition, offset)])
    deadline = time.monotonic() + PROBE_S
    while time.monotonic() < deadline:
        for raw in consumer.consume(1, 0.1):
            error = raw.error()
            if error is not None and error.code() in UNFETCHABLE:
                return raw.offset() == base
            # A message, the end of the partition, or an offset after the end.
            if error is None or error.code() in (
                KafkaError._PARTITION_EOF,
                KafkaError._AUTO_OFFSET_RESET,
            ):
                return False
    raise BrokerUnreachable(
        f"{topic}[{partition}]: nothing has come for {PROBE_S:.0f} s at offset {offset}; "
        "is the broker up?"
    )
