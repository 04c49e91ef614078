"""Topics made directly on a broker, for tests that need no run file."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.waiting import patience


def make_topics(address: str, topics: Mapping[str, int]) -> None:
    admin = AdminClient({"bootstrap.servers": address})  # kept: its requests end with it
    futures = admin.create_topics([NewTopic(name, n, 1) for name, n in topics.items()])
    for future in futures.values():
        future.result(timeout=patience(60))


def topics_at(address: str) -> set[str]:
    admin = AdminClient({"bootstrap.servers": address})
    return set(admin.list_topics(timeout=patience(10)).topics)
