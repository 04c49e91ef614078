"""Calls to an Apache Kafka broker other than reading and writing: what an administrator asks, how a
call is repeated, and what an error of librdkafka means.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin passes its names on without saying so

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient

from streamrl.system.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnreachable,
    ConfigError,
    Fenced,
    TopicMissing,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

CALL_TIMEOUT_S = 3.0  # of one call; after it the process ends, or the call is repeated
# Calls at the start of a part are repeated for so long: a broker may still be recovering.
START_TIMEOUT_S = 10.0
COMMON = {
    "log_level": 0,
    "socket.timeout.ms": 5_000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
}

RETRIABLE = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._WAIT_COORD,
    KafkaError._DESTROY_BROKER,  # the broker that was asked has left the cluster
}
FENCED = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}
MISSING = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}


class Admin(AdminClient):
    """An admin client that knows why no broker answers: librdkafka tells only its `error_cb` that a
    password or a certificate was not accepted.

    Raises ConfigError for settings that librdkafka does not take.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.address = address_of(settings)
        self._refusal = ""
        conf: dict[str, Any] = {**COMMON, **settings, "error_cb": self._on_error}
        try:
            super().__init__(conf)
        except KafkaException as exception:
            raise ConfigError(
                f"kafka: librdkafka does not take these settings: {exception.args[0].str()}"
            ) from None

    def visible_topics(self, timeout_s: float = START_TIMEOUT_S) -> Mapping[str, Any]:
        """Metadata of all topics that this user may see. Raises BrokerUnreachable, or AccessDenied
        when client and broker do not accept each other.
        """
        return self._metadata(None, timeout_s)

    def topic_metadata(self, topic: str) -> Any:
        """Metadata of one topic. It has an error if this user does not see the topic. Raises as
        `visible_topics`.
        """
        return self._metadata(topic, START_TIMEOUT_S)[topic]

    def _metadata(self, topic: str | None, timeout_s: float) -> Mapping[str, Any]:
        """Metadata of one topic, also of one that is missing, or of all that are visible."""
        try:
            return call_with_retries(
                lambda: self.list_topics(topic, timeout=CALL_TIMEOUT_S), self.address, timeout_s
            ).topics
        except BrokerUnreachable:
            self.poll(0)
            if self._refusal:
                raise AccessDenied(
                    f"this client and the broker do not accept each other: {self._refusal}; "
                    "see `kafka` in the run file"
                ) from None
            raise

    def _on_error(self, error: KafkaError) -> None:
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL):
            self._refusal = error.str()


def address_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("bootstrap.servers"))


def call_with_retries(call: Callable[[], T], address: str, timeout_s: float = START_TIMEOUT_S) -> T:
    """Make a call that a starting or recovering broker may refuse, until it succeeds or `timeout_s`
    is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() in FENCED:
                raise Fenced.taken_over() from None
            if error.code() in MISSING:
                raise TopicMissing(
                    f"{error.str()} on {address}; "
                    "create the topics with `streamrl topics apply RUN.yaml`"
                ) from None
            if error.code() in DENIED:
                raise AccessDenied(
                    f"{address} refuses ({error.name()}); "
                    "`streamrl topics acls RUN.yaml` lists what each role needs"
                ) from None
            if error.code() not in RETRIABLE and not error.retriable():
                raise BrokerError(f"{address}: {error.str()}") from None
            if time.monotonic() >= deadline:
                raise BrokerUnreachable(
                    f"no Kafka broker answers at {address} ({error.str()}); start one with "
                    "`streamrl broker RUN.yaml` or name yours in STREAMRL_KAFKA"
                ) from None
            logger.debug("%s: %s: again", address, error.str())
            time.sleep(0.05)


def access_denied(settings: Mapping[str, Any], what: str) -> AccessDenied:
    """The error that names who may not do it. `what`: the operation, and on what."""
    who = f"user {settings['sasl.username']!r}" if "sasl.username" in settings else "this client"
    return AccessDenied(
        f"{who} may not {what} on {address_of(settings)}; "
        "`streamrl topics acls RUN.yaml` lists what each role needs"
    )


def topics_without_write_access(settings: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Those of the topics that the broker does not let this client write to. The error of a
    transaction does not name them.
    """
    admin = Admin(settings)  # kept in a variable: its requests end with it
    futures = admin.describe_topics(
        TopicCollection(list(names)),
        include_authorized_operations=True,
        request_timeout=CALL_TIMEOUT_S,
    )
    forbidden: list[str] = []
    for name, future in futures.items():
        try:
            operations = future.result().authorized_operations or ()
        except KafkaException:
            operations = ()
        if AclOperation.WRITE not in operations:
            forbidden.append(name)
    return forbidden
