"""The calls of Kafka's admin API that make, describe and change topics."""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin does not list in __all__ the names that it re-exports.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from streamrl.stream.log.kafka.admin import Admin, access_denied, call_with_retries
from streamrl.stream.log.topics import Topic, default_replicas
from streamrl.system.errors import AccessDenied, BrokerError, ConfigError

T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
REQUEST_RECORDS = 4_000  # the metadata records that one request to create topics may cause
SETTLE_LIMIT_S = 30.0  # within which a further new topic has leaders, or a deleted one is gone
_REFUSED = {
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_REPLICA_ASSIGNMENT,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
}


class TopicAdmin:
    """The calls of Kafka's admin API that are needed here. Each is retried while a broker starts or
    a leader moves.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.address = str(settings.get("bootstrap.servers"))
        self._settings = settings
        self._admin = Admin(settings)

    def partitions(self) -> dict[str, tuple[int, int]]:
        """The name of every topic, and its numbers of partitions and replicas."""
        counts: dict[str, tuple[int, int]] = {}
        for name, topic in self._visible_topics().items():
            replicas = max((len(p.replicas) for p in topic.partitions.values()), default=0)
            counts[name] = (len(topic.partitions), replicas)
        return counts

    def default_replicas(self) -> int:
        """The copies of each partition that a run has here whose file sets none. A cluster has as
        many brokers as answer, or as the copies of a topic were put on.
        """
        metadata = call_with_retries(
            lambda: self._admin.list_topics(timeout=CALL_TIMEOUT_S), self.address
        )
        copies = [
            len(partition.replicas)
            for topic in metadata.topics.values()
            for partition in topic.partitions.values()
        ]
        return default_replicas(max([len(metadata.brokers), *copies]))

    def configs(self, topics: list[Topic]) -> dict[str, dict[str, str]]:
        """All settings of each topic, by its name."""
        if not topics:
            return {}

        def describe() -> dict[str, dict[str, str]]:
            futures = self._admin.describe_configs(
                [ConfigResource(ResourceType.TOPIC, t.name) for t in topics],
                request_timeout=CALL_TIMEOUT_S,
            )
            return {
                resource.name: {name: str(entry.value) for name, entry in future.result().items()}
                for resource, future in futures.items()
            }

        return self._retry(describe)

    def has_data(self, name: str, partitions: int) -> bool:
        """Whether anything was ever written to the topic."""

        def any_offset() -> bool:
            ends: Any = {TopicPartition(name, p): OffsetSpec.latest() for p in range(partitions)}
            futures = self._admin.list_offsets(ends, request_timeout=CALL_TIMEOUT_S)
            return any(future.result().offset > 0 for future in futures.values())

        return self._retry(any_offset)

    def create(self, topics: list[Topic]) -> None:
        """Create topics, and wait until each can be written to."""
        if not topics:
            return

        def request(portion: list[Topic]) -> None:
            new = [NewTopic(t.name, t.partitions, t.replicas, config=t.config) for t in portion]
            self._wait_for_all(
                self._admin.create_topics(new, request_timeout=CALL_TIMEOUT_S),
                done_already=KafkaError.TOPIC_ALREADY_EXISTS,
            )

        for portion in split_requests(topics):
            self._retry(partial(request, portion))
        self._wait_until(partial(_without_leaders, topics))

    def grow(self, topics: list[Topic]) -> None:
        """Add partitions up to the planned number, and wait until each can be written to."""
        if not topics:
            return
        wanted = [NewPartitions(t.name, t.partitions) for t in topics]
        self._retry(lambda: self._wait_for_all(self._admin.create_partitions(wanted)))
        self._wait_until(partial(_without_leaders, topics))

    def configure(self, settings: Mapping[str, Mapping[str, str]]) -> None:
        """Set single settings of topics, by the topic's name. Settings that are not named keep
        their values.
        """
        if not settings:
            return
        resources = [
            ConfigResource(
                ResourceType.TOPIC,
                topic,
                incremental_configs=[
                    ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
                    for name, value in wanted.items()
                ],
            )
            for topic, wanted in settings.items()
        ]
        self._retry(
            lambda: self._wait_for_all(
                self._admin.incremental_alter_configs(resources, request_timeout=CALL_TIMEOUT_S)
            )
        )

    def delete(self, names: list[str]) -> None:
        """Delete topics, and wait until they are gone."""
        if not names:
            return

        def request() -> None:
            self._wait_for_all(
                self._admin.delete_topics(names, request_timeout=CALL_TIMEOUT_S),
                done_already=KafkaError.UNKNOWN_TOPIC_OR_PART,
            )

        self._retry(request)
        self._wait_until(lambda existing: len(set(names) & existing.keys()))

    def _wait_for_all(self, futures: Mapping[Any, Any], done_already: int | None = None) -> None:
        """Wait for all results of a request.

        `done_already` is the error by which the cluster reports that there is nothing left to do.
        Raises ConfigError for a request that the cluster refuses, with its reason.
        """
        for name, future in futures.items():
            try:
                future.result()
            except KafkaException as exception:
                error = exception.args[0]
                if error.code() in _REFUSED:
                    raise ConfigError(
                        f"topic {getattr(name, 'name', name)}: {self.address} refuses:"
                        f" {error.str()} (`topics` in the run file)"
                    ) from None
                if error.code() != done_already:
                    raise

    def _wait_until(self, count_left: Callable[[Mapping[str, Any]], int]) -> None:
        """Wait until a request has taken effect on all topics: `count_left` of their metadata is 0.
        Raises BrokerError if nothing is done for SETTLE_LIMIT_S.
        """
        least = left = count_left(self._visible_topics())
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while left:
            if left < least:
                least = left
                deadline = time.monotonic() + SETTLE_LIMIT_S
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{self.address} has accepted changes of topics but not carried them out for"
                    f" {SETTLE_LIMIT_S:.0f} s, {left} of them; see its log"
                )
            time.sleep(0.05)
            left = count_left(self._visible_topics())

    def _visible_topics(self) -> Mapping[str, Any]:
        return self._admin.visible_topics(CALL_TIMEOUT_S / 2)

    def _retry(self, call: Callable[[], T]) -> T:
        try:
            return call_with_retries(call, self.address)
        except AccessDenied:
            raise access_denied(self._settings, "make, describe or change topics") from None


def split_requests(topics: list[Topic]) -> Iterator[list[Topic]]:
    """Split topics into portions that one request can create.

    The controller writes a metadata record for each topic, partition and setting, and at most
    10,000 of them for one request.
    """
    portion = list[Topic]()
    records = 0
    for topic in topics:
        wanted = 1 + topic.partitions + len(topic.config)
        if portion and records + wanted > REQUEST_RECORDS:
            yield portion
            portion = []
            records = 0
        portion.append(topic)
        records += wanted
    if portion:
        yield portion


def _without_leaders(wanted: list[Topic], existing: Mapping[str, Any]) -> int:
    """How many of the topics do not have a leader of each partition."""
    count = 0
    for topic in wanted:
        found = existing.get(topic.name)
        partitions = found.partitions.values() if found else ()
        count += sum(partition.leader >= 0 for partition in partitions) != topic.partitions
    return count
