"""The ceiling: the same bytes over the same number of hops through plain librdkafka, with no
transactions, no codec and nothing decided.

    python -m bench.raw source|relay|gather|sink SETTINGS.json

source -> raw.rollouts -> relay -> raw.groups -> gather -> raw.batches -> sink, each a process, with
our own client settings. Who stands between hands on the bytes that came, as many as ours had on
that hop. What is in flight is bounded, as ours is.

With `transactions`: as much in one as ours have, with a record in a journal, and readers that see
only what is committed. Still nothing is decided.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from bench.stations import Count, Orders
from bench.work import VARIANTS
from streamrl.stream.log.kafka.admin import COMMON, START_TIMEOUT_S
from streamrl.stream.log.kafka.producer import PRODUCER
from streamrl.stream.log.kafka.reader import CONSUMER
from streamrl.stream.log.kafka.writer import TRANSACTIONAL

TOPICS = ("rollouts", "groups", "batches")
JOURNAL = "journal"
ENTRY = bytes(200)
MAX_RECORD = 4_000_000
COMMIT_S = 60.0  # at most: a broker that is slow is measured


def consumer(kafka: dict[str, str], topic: str, transactions: bool) -> Consumer:
    isolation = "read_committed" if transactions else "read_uncommitted"
    made = Consumer(
        {**COMMON, **kafka, **CONSUMER, "isolation.level": isolation, "group.id": "raw"}
    )
    made.assign([TopicPartition(topic, 0, 0)])
    return made


def taken(source: Consumer) -> list[bytes]:
    """What has come in."""
    values = list[bytes]()
    for message in source.consume(512, 0.02):
        if (error := message.error()) is None:
            values.append(message.value() or b"")
        elif error.code() != KafkaError._PARTITION_EOF:
            raise RuntimeError(error.str())
    return values


def together(values: Sequence[bytes], size: int) -> bytes:
    """As much of each as makes `size` bytes."""
    return b"".join([memoryview(value)[: size // len(values)] for value in values]).ljust(
        size, b"\0"
    )


def payloads(size: int) -> list[bytes]:
    """As different as ours are."""
    return [os.urandom(size) for _ in range(VARIANTS)]


class Sender:
    """A producer, plain or transactional."""

    def __init__(self, kafka: dict[str, str], prefix: str, role: str, transactions: bool) -> None:
        own: dict[str, Any] = (
            {**TRANSACTIONAL, "transactional.id": f"{prefix}.{role}"} if transactions else {}
        )
        self.producer = Producer({**COMMON, **kafka, **PRODUCER, **own})
        self._journal = f"{prefix}.{JOURNAL}"
        self._transactions = transactions
        if transactions:
            self.producer.init_transactions(START_TIMEOUT_S)

    @contextmanager
    def turn(self) -> Generator[None]:
        """What is sent in it is one transaction, if there are any."""
        if self._transactions:
            self.producer.begin_transaction()
        yield
        if self._transactions:
            self.send(self._journal, ENTRY)
            self.producer.commit_transaction(COMMIT_S)
        else:
            self.producer.poll(0)

    def send(self, topic: str, value: bytes) -> None:
        while True:
            try:
                self.producer.produce(topic, value=value, partition=0)
                return
            except BufferError:
                self.producer.poll(0.01)


def main(role: str, path: str) -> None:
    settings = json.loads(Path(path).read_text())
    kafka = settings["kafka"]
    sizes = settings["raw"]
    prefix = settings["raw_prefix"]
    transactions = settings["raw_transactions"]
    counts = Path(settings["counts"])
    orders = Orders()
    sender = Sender(kafka, prefix, role, transactions)
    rollouts, groups, batches = (f"{prefix}.{topic}" for topic in TOPICS)
    if role == "source":
        count = Count(counts / "source", create=True)
        sunk = Count(counts / "sink")
        values = payloads(sizes["rollout_bytes"])
        while not orders.over.is_set():
            if orders.values.get("rate", 0) == 0 or count.get() - sunk.get() > sizes["in_flight"]:
                sender.producer.poll(0)
                time.sleep(0.001)
                continue
            with sender.turn():
                for number in range(sizes["at_once"]):
                    sender.send(rollouts, values[number % VARIANTS])
            count.add(sizes["at_once"])
    elif role == "sink":
        count = Count(counts / "sink")
        source = consumer(kafka, batches, transactions)
        pieces = -(-sizes["batch_bytes"] // MAX_RECORD)
        came = 0
        while not orders.over.is_set():
            came += len(taken(source))
            for _ in range(came // pieces):
                with sender.turn():
                    pass  # the journal's record stands for the version that a batch gives
            count.add(came // pieces * sizes["batch"])
            came %= pieces
    else:
        topic, out, many = (
            (rollouts, groups, sizes["group"])
            if role == "relay"
            else (groups, batches, sizes["batch"] // sizes["group"])
        )
        size = sizes["group_bytes"] if role == "relay" else sizes["batch_bytes"]
        source = consumer(kafka, topic, transactions)
        held = list[bytes]()
        while not orders.over.is_set():
            held += taken(source)
            if len(held) < many:
                continue
            with sender.turn():
                for start in range(0, len(held) - many + 1, many):
                    record = together(held[start : start + many], size)
                    for piece in range(0, size, MAX_RECORD):
                        sender.send(out, record[piece : piece + MAX_RECORD])
            del held[: len(held) - len(held) % many]
    sender.producer.purge()


if __name__ == "__main__":
    main(*sys.argv[1:])
