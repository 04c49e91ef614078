"""Sends messages to a Kafka broker outside of transactions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from streamrl.stream.log.chunks import split
from streamrl.stream.log.kafka.admin import DENIED, access_denied, address_of
from streamrl.stream.log.protocol import Message, OnWritten
from streamrl.system.errors import BrokerUnreachable

DELIVERY_LIMIT_S = 30.0  # a producer forgets what it could not deliver within this time
DELIVERY_POLL_S = 0.2
# What topics take, and what the headers of a dead letter add to a record of that size.
MAX_MESSAGE_BYTES = 8 * 1024 * 1024 + 65_536
PRODUCER = {
    # as Java and kafka-python clients do, so that the same key goes to the same partition
    "partitioner": "murmur2_random",
    "linger.ms": 5,
    # One batch holds a transaction. Between several an idempotent producer spins: 16 us a rollout
    # instead of 6.
    "batch.size": 4_000_000,
    "message.max.bytes": MAX_MESSAGE_BYTES,
    "queue.buffering.max.kbytes": 512_000,
    "retry.backoff.ms": 1,  # a transaction takes 5 ms, and 105 by default (measured)
    "retry.backoff.max.ms": 10,
}


class KafkaProducer:
    def __init__(self, settings: Mapping[str, Any], prefix: str, durable: bool = False) -> None:
        self._settings = settings
        self._prefix = prefix
        own: dict[str, Any] = {"acks": "1", "message.timeout.ms": round(DELIVERY_LIMIT_S * 1000)}
        if durable:
            # Without idempotence a request that is sent again may write the chunks of a record in
            # another order, or twice.
            own |= {"acks": "all", "enable.idempotence": True, "linger.ms": 0}
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

    def flush(self, timeout_s: float = 30.0) -> None:
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
        `send` or `flush`, which is enough where no caller waits for them.
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
        """The delivery report of one of `count` messages that a caller waits for. `offsets`: of
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
        """The delivery report of a message that no caller waits for: only a missing right is an
        error, because only that can never work.
        """
        if error is not None and error.code() in DENIED:
            self._denied_topic = message.topic()

    def _raise_denied(self) -> None:
        if self._denied_topic:
            raise access_denied(self._settings, f"write to topic {self._denied_topic}")


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
