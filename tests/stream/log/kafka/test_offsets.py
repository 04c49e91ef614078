"""Offsets are known again as soon as there is a leader, on librdkafka's mock cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from streamrl.stream.log.kafka import admin as kafka_admin
from streamrl.stream.log.kafka import offsets as kafka_offsets
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Message
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.system.errors import BrokerUnreachable, TopicMissing
from tests.support.mock_cluster import MockCluster
from tests.support.waiting import patience, until

TOPICS = ("run.turns", "run.journal.env-a-0")
JOURNAL = "journal.env-a-0", 0
MESSAGES = [Message("turns", b"k", b"v"), Message(JOURNAL[0], b"k", b"v")]


def log_on(cluster: MockCluster) -> KafkaLog:
    return KafkaLog({"bootstrap.servers": cluster.address, "log_level": 0}, "run")


def test_a_client_that_has_asked_a_dead_leader_learns_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kafka_offsets, "CALL_TIMEOUT_S", 0.5)
    cluster = MockCluster(3, TOPICS)
    log = log_on(cluster)
    assert log.end_offsets([JOURNAL]) == {JOURNAL: 0}
    cluster.stop_broker(1)
    cluster.elect(3)
    assert log.end_offsets([JOURNAL]) == {JOURNAL: 0}


def test_without_a_leader_no_offset_is_made_up_and_the_topic_is_not_missing(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kafka_offsets, "CALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(kafka_admin.call_with_retries, "__defaults__", (0.5,))
    cluster = MockCluster(3, TOPICS)
    cluster.stop_broker(1)
    with pytest.raises(BrokerUnreachable):
        log_on(cluster).end_offsets([JOURNAL])


@pytest.mark.parametrize("times", [2, 12])
def test_a_writer_commits_when_its_leader_was_away_for_longer_than_calls_wait(
    times: int, monkeypatch: pytest.MonkeyPatch
):
    """Its journal's leader dies with the transaction under way. The writer asks for the journal's
    end so many times in vain before there is another leader.
    """
    failed = list[object]()
    monkeypatch.setattr(kafka_offsets, "drop", failed.append)
    monkeypatch.setattr(kafka_offsets, "CALL_TIMEOUT_S", 0.5)
    cluster = MockCluster(3, TOPICS)
    cluster.set_transaction_coordinator("run.env-a-0", 2)
    log = log_on(cluster)
    writer = RetryingWriter(log, "env-a-0", JOURNAL[0], patience_s=patience(40))
    writer.commit(MESSAGES)
    cluster.stop_broker(1)
    offsets = list[int]()
    thread = threading.Thread(target=lambda: offsets.append(writer.commit(MESSAGES)))
    thread.start()
    until(lambda: len(failed) >= times)
    cluster.elect(3)
    thread.join(patience(40))
    assert len(offsets) == 1
    writer.close()


def test_a_partition_that_there_is_not_is_named():
    cluster = MockCluster(1, TOPICS)
    log = log_on(cluster)
    with pytest.raises(TopicMissing, match="topic run.turns"):
        log.beginning_offsets([("turns", 4)])


def test_each_answer_that_failed_costs_the_client_and_the_next_one_is_new(
    monkeypatch: pytest.MonkeyPatch,
):
    """An error for one partition, an offset that is none, and then an answer."""
    answers: list[KafkaError | int] = [
        KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION),
        -1001,
        7,
    ]
    clients = list[Any]()

    class Client:
        def __init__(self, settings: Any) -> None:
            clients.append(self)

        def offsets_for_times(self, asked: Any, timeout: float) -> Any:
            answer = answers.pop(0)
            error = answer if isinstance(answer, KafkaError) else None
            offset = answer if isinstance(answer, int) else 0
            return [
                SimpleNamespace(topic=tp.topic, partition=tp.partition, offset=offset, error=error)
                for tp in asked
            ]

    monkeypatch.setattr(kafka_offsets, "Consumer", Client)
    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, "run")
    assert log.end_offsets([("turns.agent", 0)]) == {("turns.agent", 0): 7}
    assert len(clients) == 3
