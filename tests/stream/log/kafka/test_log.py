"""What only Kafka answers: that a group has no coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from streamrl.stream.log.kafka import log as kafka
from streamrl.stream.log.kafka.log import KafkaLog


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
