"""Errors without a topic, and what a reader asks a broker for."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from streamrl.errors import AccessDenied
from streamrl.log.kafka import KafkaLog
from streamrl.log.kafka_reader import KafkaReader
from streamrl.log.protocol import Message
from tests.support.kafka import make_topics
from tests.support.mock_cluster import mock_cluster
from tests.support.waiting import until


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
