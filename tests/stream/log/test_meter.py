from __future__ import annotations

import pytest

from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog, MemoryProducer
from streamrl.stream.log.meter import METRICS, Meter
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric
from streamrl.system.errors import BrokerUnreachable


def test_what_is_measured_lies_in_the_topic_with_its_source_its_step_and_its_time():
    log = MemoryLog({METRICS: 1})
    meter = Meter(log, "buffer")
    meter.publish({"a": 1.0}, step=3, time_s=7.0)
    meter.publish({"b": 2.0})
    first, second = (to_event(message, ("metric",)).record for message in read(log, METRICS, 0, 0))
    assert first == Metric(source="buffer", time_s=7.0, values={"a": 1.0}, step=3)
    assert isinstance(second, Metric) and second.step is None and second.time_s > 1e9


def test_a_broker_that_is_gone_does_not_keep_a_part_from_ending(monkeypatch: pytest.MonkeyPatch):
    def nobody(*_: object) -> None:
        raise BrokerUnreachable("no Kafka broker answers")

    closed: list[MemoryProducer] = []
    monkeypatch.setattr(MemoryProducer, "flush", nobody)
    monkeypatch.setattr(MemoryProducer, "close", lambda producer: closed.append(producer))
    Meter(MemoryLog({METRICS: 1}), "buffer").close()
    assert len(closed) == 1
