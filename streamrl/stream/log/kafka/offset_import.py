"""Writing a recorded run into topics on a broker so that every record gets its old offset."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from streamrl.stream.log.import_plan import WriteOp
from streamrl.stream.log.kafka.admin import CALL_TIMEOUT_S, call_with_retries
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.producer import PRODUCER, produce
from streamrl.stream.log.protocol import Message, TopicPartition, end_offset
from streamrl.system.errors import BrokerError, BrokerUnreachable

IMPORT_TIMEOUT_S = 30.0  # of one call: an import writes as fast as the broker takes it


class OffsetPreservingWriter:
    """Writes recorded messages to the topics of a run, each at its old offset and with its old
    time. The topics must be empty, and nothing else may write to them: BrokerError is raised when a
    message lands elsewhere.
    """

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        settings = {**log.settings, **PRODUCER}
        self._plain = Producer({**settings, "enable.idempotence": True})
        transactional = {
            "transactional.id": log.prefix + "import",
            "transaction.timeout.ms": 60_000,
            "message.timeout.ms": 30_000,
        }
        self._transactional = Producer({**settings, **transactional})
        call_with_retries(
            lambda: self._transactional.init_transactions(CALL_TIMEOUT_S), log.address
        )
        self._ends: dict[TopicPartition, int] = {}
        self._misplaced = ""

    def write(self, ops: Sequence[WriteOp]) -> None:
        """Do the next op of some partitions, at most one of each. All plain messages are written
        first, then one transaction that commits, then one that aborts.
        """
        plain: list[Message] = []
        committed: list[Message] = []
        for op in ops:
            if op.committed:
                committed += op.messages
            elif op.messages:
                # A marker may come after its transaction has ended, and only the next transaction
                # of the same producer waits for it.
                self._wait_for_end(op.tp)
                plain += op.messages
        try:
            self._produce(self._plain, plain)
            if committed:
                self._transactional.begin_transaction()
                self._produce(self._transactional, committed)
                self._transactional.commit_transaction(IMPORT_TIMEOUT_S)
            if any(op.placeholder_count for op in ops):
                self._transactional.begin_transaction()
                placeholders = chain.from_iterable(op.placeholders for op in ops)
                self._produce(self._transactional, placeholders)
                self._transactional.abort_transaction(IMPORT_TIMEOUT_S)
        except KafkaException as exception:
            raise BrokerError(
                f"writing to {self._log.address}: {exception.args[0].str()}"
            ) from None
        for op in ops:
            self._ends[op.tp] = op.end

    def wait(self) -> None:
        """Wait until all partitions end where they should."""
        for tp in self._ends:
            self._wait_for_end(tp)

    def _produce(self, producer: Producer, messages: Iterable[Message]) -> None:
        for message in messages:
            timestamp_ms = round(message.timestamp_s * 1000)
            on_delivery = partial(self._check_offset, message)
            produce(producer, self._log.prefix, message, on_delivery, timestamp_ms)
        if producer.flush(IMPORT_TIMEOUT_S):
            raise BrokerUnreachable(
                f"{self._log.address} has taken nothing for {IMPORT_TIMEOUT_S:.0f} s; "
                "is the broker up?"
            )
        if self._misplaced:
            raise BrokerError(self._misplaced)

    def _check_offset(self, message: Message, error: KafkaError | None, written: Any) -> None:
        where = f"{message.topic}[{message.partition}]@{message.offset}"
        if error is not None:
            self._misplaced = f"{where} cannot be written to {self._log.address}: {error.str()}"
        elif written.offset() != message.offset:
            self._misplaced = (
                f"{where} was written at offset {written.offset()}; "
                f"does another program write to {self._log.prefix}{message.topic}?"
            )

    def _wait_for_end(self, tp: TopicPartition) -> None:
        """Wait until everything written to a partition shows there, markers included."""
        deadline = time.monotonic() + IMPORT_TIMEOUT_S
        expected = self._ends.get(tp, 0)
        while (end := end_offset(self._log, *tp)) < expected:
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{tp[0]}[{tp[1]}] ends at {end} and not at {expected}; "
                    "does another program write to it?"
                )
            time.sleep(0.002)
