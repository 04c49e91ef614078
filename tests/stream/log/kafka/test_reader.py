"""Errors without a topic, and what a reader asks a broker for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, Producer

from streamrl.stream.log.codec import to_event
from streamrl.stream.log.kafka import reader as kafka_reader
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.reader import KafkaReader
from streamrl.stream.log.protocol import Message, Reader, Undecodable
from streamrl.stream.log.reading import read
from streamrl.system.errors import AccessDenied
from tests.support.kafka import make_topics
from tests.support.mock_cluster import MockCluster, mock_cluster
from tests.support.waiting import patience, until


def test_a_reader_whose_group_is_refused_says_so():
    """Such an error has no topic, as it is of none."""
    with mock_cluster(["r.in"]) as address:
        reader = KafkaLog({"bootstrap.servers": address}, "r").reader({("in", 0): 0}, whole=False)
        refused = SimpleNamespace(
            topic=lambda: None,
            partition=int,
            offset=int,
            error=lambda: KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED),
        )
        reader.close()
        reader._consumer = SimpleNamespace(consume=lambda *_: [refused])
        with pytest.raises(AccessDenied, match="use group r.reader"):
            reader.poll(1, 0.0)


def test_a_bounded_reader_that_has_reached_the_end_asks_again_only_when_it_is_polled(
    broker: str, run_name: str
):
    """A replay has one for each partition of each env, and reads one of them at a time."""
    make_topics(broker, {f"{run_name}.in": 1})
    log = KafkaLog({"bootstrap.servers": broker}, run_name)
    fetches = [0]

    def count(statistics: str) -> None:
        brokers = json.loads(statistics)["brokers"].values()
        fetches.append(sum(each["req"]["Fetch"] for each in brokers))

    settings = {"bootstrap.servers": broker, "stats_cb": count, "statistics.interval.ms": 20}
    reader = KafkaReader(settings, f"{run_name}.", {("in", 0): 0}, bounded=True)
    log.writer("one").commit([Message("in", b"k", b"1")])
    found: list[Message] = []

    def has(messages: int) -> bool:
        found.extend(reader.poll(10, 0.05))
        return len(found) == messages and bool(reader._ended)

    until(lambda: has(1))
    before = fetches[-1]
    time.sleep(1.0)  # in which it would ask a hundred times
    reader.poll(10, 0.05)
    assert fetches[-1] - before < 20
    log.writer("one").commit([Message("in", b"k", b"2")])
    until(lambda: has(2))
    assert [message.value for message in found] == [b"1", b"2"]
    reader.close()


def test_a_topic_that_is_paused_at_its_end_stays_paused(broker: str, run_name: str):
    make_topics(broker, {f"{run_name}.in": 1, f"{run_name}.other": 1})
    log = KafkaLog({"bootstrap.servers": broker}, run_name)
    reader = KafkaReader(
        {"bootstrap.servers": broker},
        f"{run_name}.",
        {("in", 0): 0, ("other", 0): 0},
        bounded=True,
    )
    found: list[str] = []

    def poll() -> list[str]:
        found.extend(message.topic for message in reader.poll(10, 0.05))
        return found

    until(lambda: not poll() and len(reader._ended) == 2)
    reader.set_paused({"in"})
    log.writer("one").commit([Message("in", b"k", b"1"), Message("other", b"k", b"2")])
    until(lambda: "other" in poll())
    assert found == ["other"]
    reader.set_paused(())
    until(lambda: "in" in poll())
    assert found == ["other", "in"]
    reader.close()


def test_a_header_whose_name_is_not_utf8_costs_the_headers_of_its_record_and_nothing_else():
    """Forty times, as Python treats a call that it has seen often in another way."""
    cluster = MockCluster(1, ["r.in"])
    for _ in range(40):
        cluster.produce("r.in", b"body", [("schema", b"x"), (b"trace-\xff", b"v")])
        cluster.produce("r.in", b"next", [("schema", b"x")])
    reader = KafkaReader({"bootstrap.servers": cluster.address}, "r.", {("in", 0): 0})
    found = polled(reader, 80)
    assert [message.offset for message in found] == list(range(80))
    assert {message.value for message in found[::2]} == {b"body"}
    assert {cause_of(message) for message in found[::2]} == {"the name of a header is not UTF-8"}
    assert {(m.value, m.headers) for m in found[1::2]} == {(b"next", (("schema", b"x"),))}


def test_a_record_with_a_million_headers_is_taken_for_one_without(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kafka_reader, "MAX_HEADERS", 3)
    cluster = MockCluster(1, ["r.in"])
    for count in (3, 4):
        cluster.produce("r.in", b"body", [("x", b"")] * count)
    reader = KafkaReader({"bootstrap.servers": cluster.address}, "r.", {("in", 0): 0})
    good, bad = polled(reader, 2)
    assert good.headers == (("x", b""),) * 3
    assert cause_of(bad) == "it has 4 headers, more than 3"


def test_batches_that_cannot_be_decompressed_are_stepped_over_wherever_a_reader_begins(
    broker: str, run_name: str
):
    """More than librdkafka decompresses of zstd: one record of 95 MB, and a batch of forty of 3 MB,
    one after the other, and another one at the end.
    """
    topic = f"{run_name}.in"
    make_topics(broker, {topic: 1})
    send(broker, topic, "none", [b"0", b"1"])
    send(broker, topic, "zstd", [bytes(95_000_000)])  # offset 2
    send(broker, topic, "zstd", [bytes(3_000_000)] * 40)  # 3 to 42
    send(broker, topic, "none", [b"43"])
    send(broker, topic, "zstd", [bytes(95_000_000)])  # 44
    log = KafkaLog({"bootstrap.servers": broker}, run_name)
    for start, offsets in [(0, [0, 1, 2, 3, 43, 44]), (3, [3, 43, 44]), (20, [43, 44])]:
        found = list(read(log, "in", 0, start))
        assert [message.offset for message in found] == offsets
    assert [cause_of(message)[:47] for message in found if not message.value] == [
        "the batch of offsets 44 to 44 cannot be fetched"
    ]
    send(broker, topic, "none", [b"45"])
    reader = log.reader({("in", 0): 4})
    assert [message.value for message in polled(reader, 3)] == [b"43", b"", b"45"]
    assert reader.position("in", 0) == 46
    reader.close()


def polled(reader: Reader, count: int) -> list[Message]:
    found: list[Message] = []

    def has_all() -> bool:
        found.extend(reader.poll(10, 0.05))
        return len(found) >= count

    until(has_all)
    return found


def cause_of(message: Message) -> str:
    record = to_event(message, ("x",)).record
    assert isinstance(record, Undecodable)
    return record.cause


def send(address: str, topic: str, codec: str, values: Sequence[bytes]) -> None:
    """Write the values as one batch."""
    settings = {
        "bootstrap.servers": address,
        "compression.type": codec,
        "message.max.bytes": 1_000_000_000,
        "batch.size": 1_000_000_000,
        "linger.ms": 1_000,
    }
    producer = Producer(settings)
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(patience(60)) == 0
