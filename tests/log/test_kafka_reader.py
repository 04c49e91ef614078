"""Errors without a topic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from streamrl.errors import AccessDenied
from streamrl.log.kafka import KafkaLog
from tests.support.mock_cluster import mock_cluster


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
