"""Plain transactional producers, each with another broker as its coordinator: `python -m
tests.chaos_cluster.control ADDRESS TOPIC COMMITS...`, with a file for the commits of each.

Time-outs are librdkafka's own, and a transaction writes to every partition of the topic.
"""

from __future__ import annotations

import sys
import threading
import time

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from tests.chaos_cluster.part import Commits

PARTITIONS = 6
PAUSE_S = 0.05
COORDINATORS = "__transaction_state"


def identities(address: str, count: int) -> list[str]:
    """Transactional ids, each of which has a coordinator on another broker."""
    first = Producer({"bootstrap.servers": address, "transactional.id": "first"})
    first.init_transactions()  # The topic is made for the first producer.
    admin = AdminClient({"bootstrap.servers": address})
    topic = admin.list_topics(COORDINATORS, timeout=30).topics[COORDINATORS]
    by_broker: dict[int, str] = {}
    for number in range(1_000):
        name = f"control-{number}"
        partition = topic.partitions[java_hash(name) % len(topic.partitions)]
        by_broker.setdefault(partition.leader, name)
    return list(by_broker.values())[:count]


def java_hash(text: str) -> int:
    """Java's hash of a string, without its sign."""
    code = 0
    for character in text:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    return code & 0x7FFFFFFF


def produce(address: str, identity: str, topic: str, commits: Commits) -> None:
    while True:
        settings = {"bootstrap.servers": address, "transactional.id": identity, "log_level": 0}
        producer = Producer(settings)
        try:
            retried(producer.init_transactions)
            while True:
                transact(producer, topic)
                commits.note()
                time.sleep(PAUSE_S)
        except KafkaException as exception:
            print(f"{identity}: a new producer after: {exception}", file=sys.stderr, flush=True)


def transact(producer: Producer, topic: str) -> None:
    """Commit one transaction, as the documentation of librdkafka has it."""
    while True:
        try:
            producer.begin_transaction()
            for partition in range(PARTITIONS):
                producer.produce(topic, b"x" * 100, partition=partition)
            retried(producer.commit_transaction)
            return
        except KafkaException as exception:
            if not exception.args[0].txn_requires_abort():
                raise
            retried(producer.abort_transaction)


def retried(call: object) -> None:
    while True:
        try:
            call()  # type: ignore[operator]
            return
        except KafkaException as exception:
            if not exception.args[0].retriable():
                raise


def main(address: str, topic: str, *paths: str) -> None:
    for identity, path in zip(identities(address, len(paths)), paths, strict=True):
        arguments = (address, identity, topic, Commits(path))
        threading.Thread(target=produce, args=arguments).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
