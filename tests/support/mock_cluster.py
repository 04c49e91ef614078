"""librdkafka's mock cluster: brokers in this process, for how a client behaves. It keeps no
transactions apart and has no fencing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka import Producer

from tests.support.waiting import patience


@contextmanager
def mock_cluster(topics: Sequence[str]) -> Iterator[str]:
    """Address of one broker that has these topics."""
    cluster = Producer(
        {
            "test.mock.num.brokers": 1,
            "bootstrap.servers": "made by the mock cluster",
            "log_level": 0,
        }
    )
    for topic in topics:
        cluster.list_topics(topic, timeout=patience(5))  # makes it
    (broker,) = cluster.list_topics(timeout=patience(5)).brokers.values()
    yield f"{broker.host}:{broker.port}"
    del cluster
