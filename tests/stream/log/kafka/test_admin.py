from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from streamrl.stream.log.kafka.admin import Admin, access_denied, call_with_retries
from streamrl.system.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnreachable,
    ConfigError,
    Fenced,
    StreamrlError,
    TopicMissing,
)
from tests.support.mock_cluster import mock_cluster
from tests.support.waiting import patience


class Call:
    """A call that a broker refuses with each of these errors in turn, and then answers."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def __call__(self) -> str:
        if self.codes:
            raise KafkaException(KafkaError(self.codes.pop(0)))
        return "answered"


def test_a_call_is_repeated_until_the_broker_has_recovered():
    call = Call(KafkaError._TRANSPORT, KafkaError.NOT_COORDINATOR)
    assert call_with_retries(call, "b:1", patience(5)) == "answered"
    assert call.codes == []


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (KafkaError._FENCED, Fenced, "another process with this identity"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicMissing, "streamrl topics apply RUN.yaml"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessDenied, "streamrl topics acls RUN.yaml"),
        (KafkaError.INVALID_CONFIG, BrokerError, "^b:1: "),
        (KafkaError._TRANSPORT, BrokerUnreachable, "no Kafka broker answers at b:1"),
    ],
)
def test_an_error_of_librdkafka_becomes_the_one_that_says_what_to_do(
    code: int, error: type[StreamrlError], says: str
):
    with pytest.raises(error, match=says):
        call_with_retries(Call(code), "b:1", timeout_s=0.0)


def test_settings_that_librdkafka_does_not_take_are_named():
    with pytest.raises(ConfigError, match="does not take these settings: .*no.such.setting"):
        Admin({"bootstrap.servers": "b:1", "no.such.setting": 1})


def test_the_topics_of_a_cluster_are_listed():
    with mock_cluster(["r.in"]) as address:
        assert "r.in" in Admin({"bootstrap.servers": address}).visible_topics(patience(10))


def test_a_password_that_is_not_accepted_is_no_absent_broker(monkeypatch: pytest.MonkeyPatch):
    """librdkafka tells it to its callback only."""
    monkeypatch.setattr("streamrl.stream.log.kafka.admin.CALL_TIMEOUT_S", 0.1)
    admin = Admin({"bootstrap.servers": "127.0.0.1:9"})
    admin._on_error(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    with pytest.raises(AccessDenied, match="do not accept each other: wrong password"):
        admin.visible_topics(0.0)


def test_a_denial_names_the_user_and_the_address():
    of_user = access_denied({"bootstrap.servers": "b:1", "sasl.username": "eve"}, "read topic x")
    assert "user 'eve' may not read topic x on b:1" in str(of_user)
    assert "this client may not" in str(access_denied({"bootstrap.servers": "b:1"}, "read topic x"))
