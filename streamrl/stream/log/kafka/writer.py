"""Writes transactions to a Kafka broker, under the identity of a part.

A transactional call that fails is not repeated by its producer, which would hang for minutes after
the death of a broker: the process ends, or `retrying.py` opens another producer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition

from streamrl.stream.log.chunks import size_of, split
from streamrl.stream.log.kafka.admin import (
    CALL_TIMEOUT_S,
    FENCED,
    START_TIMEOUT_S,
    access_denied,
    address_of,
    call_with_retries,
    topics_without_write_access,
)
from streamrl.stream.log.kafka.committer import OffsetCommitter
from streamrl.stream.log.kafka.producer import PRODUCER, produce
from streamrl.stream.log.protocol import Message, Offsets
from streamrl.system.errors import (
    AccessDenied,
    BrokerUnreachable,
    Fenced,
    StreamrlError,
    TopicMissing,
    TransactionFailed,
)

logger = logging.getLogger(__name__)

# After it the broker aborts a transaction. At MIN_BYTES_PER_S half a gigabyte can be written in it.
TRANSACTION_TIMEOUT_S = 60.0
MIN_BYTES_PER_S = 10_000_000  # a broker that takes less of a transaction is not waited for
# For a commit, besides the time in which its messages are sent. A cluster replaces a leader that is
# dead only after the 9 s of a session, so a transaction that is given up before gains nothing.
WAIT_S = CALL_TIMEOUT_S
CLUSTER_WAIT_S = 12.0
MAX_WAIT_S = 24.0
# An open transaction of a process that has died is waited for so long.
SETTLE_TIMEOUT_S = TRANSACTION_TIMEOUT_S + 15.0
TRANSACTIONAL = {
    "transaction.timeout.ms": round(TRANSACTION_TIMEOUT_S * 1000),
    "message.timeout.ms": round(TRANSACTION_TIMEOUT_S * 1000),  # `CommitWait` is shorter
    # librdkafka would believe in a group's coordinator, and wait for it, long after that broker has
    # died.
    "metadata.max.age.ms": 2_000,
}


class CommitWait:
    """How long the commits of a process are waited for, on a cluster of so many brokers. After one
    that failed it is twice as long, and half as long after one that took less than a quarter of it:
    a transaction that is aborted and written again makes a cluster that is slow even slower.
    """

    def __init__(self, brokers: int = 1) -> None:
        self._least_s = WAIT_S if brokers == 1 else CLUSTER_WAIT_S
        self.seconds = self._least_s

    def on_failure(self) -> None:
        self.seconds = min(2 * self.seconds, MAX_WAIT_S)

    def on_commit(self, took_s: float) -> None:
        if took_s < self.seconds / 4:
            self.seconds = max(self.seconds / 2, self._least_s)

    @property
    def request_limit_s(self) -> float:
        """How long an answer of a broker is waited for. One that stands still is left by then."""
        return self._least_s

    def limit_s(self, messages: Sequence[Message]) -> float:
        """How long to wait for the commit of these messages. Most of them are still to be sent when
        it begins.
        """
        sending_s = sum(map(size_of, messages)) / MIN_BYTES_PER_S
        return min(self.seconds + sending_s, TRANSACTION_TIMEOUT_S - CALL_TIMEOUT_S)


class KafkaWriter:
    """One transactional producer. It is of no use after its first failure: the next producer of the
    same identity aborts what it left open.
    """

    def __init__(
        self, settings: Mapping[str, Any], prefix: str, identity: str, wait: CommitWait
    ) -> None:
        self._settings = settings
        self._wait = wait
        self._prefix = prefix
        self._identity = identity
        name = prefix + identity
        transactional = {
            **TRANSACTIONAL,
            "transactional.id": name,
            "socket.timeout.ms": round(wait.request_limit_s * 1000),
        }
        self._producer = Producer({**settings, **PRODUCER, **transactional})
        # Offsets are committed under the name of the part, where ordinary lag tools look. In the
        # transaction they would cost two requests and a marker.
        self._committer = OffsetCommitter(settings, name)
        try:
            self._take_identity()
        except AccessDenied:
            raise access_denied(settings, f"write as transactional id {name}") from None

    def _take_identity(self) -> None:
        """Fence the process that had this identity. The broker first ends a transaction that was
        left open. That is waited for while a broker answers at all.
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
        began_s = time.monotonic()
        try:
            self._producer.begin_transaction()
            for message in messages[:-1]:
                produce(self._producer, self._prefix, message)
            # Only the last message has a delivery report: one costs more than a message does.
            for message in messages[-1:]:
                produce(self._producer, self._prefix, message, on_delivery)
            self._producer.commit_transaction(self._wait.limit_s(messages))
        except KafkaException as exception:
            self._wait.on_failure()
            topics = {message.topic for message in messages}
            self._raise_failed([exception.args[0], *undelivered], topics)
        self._wait.on_commit(time.monotonic() - began_s)
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
            raise Fenced.taken_over(self._identity)
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
            existing = self._committer.list_topics()
        except KafkaException:
            return ""
        for topic in sorted(topics):
            if self._prefix + topic not in existing:
                return self._prefix + topic
        return ""
