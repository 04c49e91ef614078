"""The ceiling: the same bytes over the same number of hops through plain librdkafka, with no transactions, no codec and nothing decided.

    python -m bench.raw source|relay|gather|sink SETTINGS.json

source -> raw.rollouts -> relay -> raw.groups -> gather -> raw.batches -> sink, each a process, with our own client settings. Who stands between hands
on the bytes that came, as many as ours had on that hop. What is in flight is bounded, as ours is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from bench.stations import Count, Orders
from bench.work import VARIANTS
from streamrl.stream.kafka import COMMON, CONSUMER, PRODUCER

TOPICS = ("rollouts", "groups", "batches")
MAX_RECORD = 4_000_000


def consumer(kafka: dict[str, str], topic: str) -> Consumer:
    made = Consumer({**COMMON, **kafka, **CONSUMER, "isolation.level": "read_uncommitted", "group.id": "raw"})
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
    return b"".join([memoryview(value)[: size // len(values)] for value in values]).ljust(size, b"\0")


def payloads(size: int) -> list[bytes]:
    """As different as ours are."""
    return [os.urandom(size) for _ in range(VARIANTS)]


def send(producer: Producer, topic: str, value: bytes) -> None:
    while True:
        try:
            producer.produce(topic, value=value, partition=0)
            return
        except BufferError:
            producer.poll(0.01)


def main(role: str, path: str) -> None:
    settings = json.loads(Path(path).read_text())
    kafka, sizes, prefix = settings["kafka"], settings["raw"], settings["raw_prefix"]
    counts, orders = Path(settings["counts"]), Orders()
    producer = Producer({**COMMON, **kafka, **PRODUCER})
    rollouts, groups, batches = (f"{prefix}.{topic}" for topic in TOPICS)
    if role == "source":
        count, sunk, values = Count(counts / "source", create=True), Count(counts / "sink"), payloads(sizes["rollout_bytes"])
        while not orders.over.is_set():
            if orders.values.get("rate", 0) == 0 or count.get() - sunk.get() > sizes["in_flight"]:
                producer.poll(0)
                time.sleep(0.001)
                continue
            for number in range(sizes["batch"]):
                send(producer, rollouts, values[number % VARIANTS])
            count.add(sizes["batch"])
            producer.poll(0)
    elif role == "sink":
        count, source = Count(counts / "sink"), consumer(kafka, batches)
        pieces, came = -(-sizes["batch_bytes"] // MAX_RECORD), 0
        while not orders.over.is_set():
            came += len(taken(source))
            count.add(came // pieces * sizes["batch"])
            came %= pieces
    else:
        topic, out, many = (rollouts, groups, sizes["group"]) if role == "relay" else (groups, batches, sizes["batch"] // sizes["group"])
        size = sizes["group_bytes"] if role == "relay" else sizes["batch_bytes"]
        source, held = consumer(kafka, topic), list[bytes]()
        while not orders.over.is_set():
            held += taken(source)
            for start in range(0, len(held) - many + 1, many):
                record = together(held[start : start + many], size)
                for piece in range(0, size, MAX_RECORD):
                    send(producer, out, record[piece : piece + MAX_RECORD])
            del held[: len(held) - len(held) % many]
            producer.poll(0)
    producer.purge()


if __name__ == "__main__":
    main(*sys.argv[1:])
