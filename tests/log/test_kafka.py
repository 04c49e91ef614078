"""What only Kafka answers: that a partition has no leader, that a group has no coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streamrl.log import kafka
from streamrl.log.kafka import KafkaLog


def test_an_end_is_asked_for_again_while_a_partition_has_no_leader(
    monkeypatch: pytest.MonkeyPatch,
):
    """What librdkafka answers in the first moments of a broker that was killed: an error that no
    leader is found, a leader of another epoch, and -1001 with no error at all. It goes on to ask
    the leader of another epoch until somebody asks for the topics.
    """
    answers: list[KafkaError | int] = [
        KafkaError(KafkaError._NOENT),
        KafkaError(KafkaError.FENCED_LEADER_EPOCH),
        -1001,
        7,
    ]

    class Answers:
        def list_offsets(self, asked: Any, **options: Any) -> Any:
            answer = answers.pop(0)
            return {tp: SimpleNamespace(result=lambda: result_of(answer)) for tp in asked}

    looked_up = list[set[str]]()

    def result_of(answer: KafkaError | int) -> Any:
        if isinstance(answer, KafkaError):
            raise KafkaException(answer)
        return SimpleNamespace(offset=answer)

    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, "run")
    monkeypatch.setattr(log, "_admin", Answers())
    monkeypatch.setattr(log, "_require", looked_up.append)
    assert log.end_offsets([("turns.agent", 0)]) == {("turns.agent", 0): 7}
    assert not answers
    assert looked_up == 2 * [{"turns.agent"}]


def test_committed_offsets_that_a_broker_cannot_tell_are_no_beginning(
    monkeypatch: pytest.MonkeyPatch,
):
    found = SimpleNamespace(topic="run.turns", partition=0, offset=-1001, error=None)
    found.error = KafkaError(KafkaError.NOT_COORDINATOR)

    class Group:
        def __init__(self, settings: Any) -> None: ...

        def committed(self, asked: Any, timeout: float) -> Any:
            answer = SimpleNamespace(**vars(found))
            found.error = None
            found.offset = 5
            return [answer]

        def close(self) -> None: ...

    monkeypatch.setattr(kafka, "Consumer", Group)
    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, "run")
    monkeypatch.setattr(log, "topics", lambda: {"turns": 1})
    assert log.committed_offsets("assembler") == {("turns", 0): 5}
