"""Whoever waits for a delivery hears of it."""

from __future__ import annotations

import socket

import pytest

from streamrl.stream.log.kafka import producer as kafka_producer
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Message
from tests.support.waiting import until


def test_whoever_waits_for_a_message_is_told_that_it_could_not_be_delivered(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kafka_producer, "DELIVERY_LIMIT_S", 0.2)
    places: list[tuple[int, int]] = []
    with socket.socket() as nobody:  # listens there
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        producer = KafkaLog({"bootstrap.servers": address}, "r").producer(durable=True)
        producer.send(Message("in", b"k", b"v"), lambda *place: places.append(place))
        until(lambda: places == [(-1, -1)])
        producer.close()
