"""An identity is waited for, and limits follow bytes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from streamrl.stream.log.kafka import writer as kafka_writer
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.writer import CommitWait
from streamrl.stream.log.protocol import Message
from streamrl.system.errors import BrokerUnreachable, TransactionFailed
from tests.support.mock_cluster import mock_cluster


@pytest.mark.parametrize("answered", [True, False])
def test_an_identity_that_the_broker_still_has_to_free_is_waited_for_while_a_broker_answers(
    answered: bool, monkeypatch: pytest.MonkeyPatch
):
    refusals = [KafkaError(KafkaError._TIMED_OUT, "busy")] * 3

    class BusyProducer(Producer):
        def init_transactions(self, *_: float) -> None:
            if refusals:
                raise KafkaException(refusals.pop())

        def list_topics(self, *arguments: Any, **named: Any) -> Any:
            if not answered:
                raise KafkaException(KafkaError(KafkaError._TRANSPORT, "nobody there"))
            return super().list_topics(*arguments, **named)

    monkeypatch.setattr(kafka_writer, "START_TIMEOUT_S", 0.0)  # of each attempt
    monkeypatch.setattr(kafka_writer, "Producer", BusyProducer)
    with mock_cluster(["r.in"]) as address:
        opened = nullcontext() if answered else pytest.raises(BrokerUnreachable, match="busy")
        with opened:
            KafkaLog({"bootstrap.servers": address}, "r").writer("a").close()
    assert len(refusals) == (0 if answered else 2)


class SlowProducer:
    """A broker behind it takes so many bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._bytes, self._reports = bytes_per_s, 0, list[Any]()

    def begin_transaction(self) -> None: ...

    def produce(
        self, topic: str, value: bytes, key: bytes, partition: int, on_delivery: Any, **_: object
    ) -> None:
        self._bytes += len(value)
        self._reports.append(on_delivery)

    def commit_transaction(self, limit_s: float) -> None:
        if self._bytes / self._bytes_per_s > limit_s:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "still to be sent"))
        self._reports[-1](None, SimpleNamespace(offset=lambda: len(self._reports) - 1))

    def purge(self) -> None: ...


def test_the_limit_of_a_transaction_follows_its_bytes():
    """A batch of 150 MB at 25 MB/s goes through; at 1 MB/s it is given up, as a small one is that
    the broker does not take.
    """
    with mock_cluster(["r.out"]) as address:
        writer = KafkaLog({"bootstrap.servers": address}, "r").writer("a")
        part = Message("out", b"k", bytes(3_750_000))
        for bytes_per_s, messages, goes_through in (
            (25e6, [part] * 40, True),
            (1e6, [part] * 40, False),
            (0.2e6, [part], False),
        ):
            writer._producer = SlowProducer(bytes_per_s)
            with (
                nullcontext()
                if goes_through
                else pytest.raises(TransactionFailed, match="still to be sent")
            ):
                assert writer.commit(messages) == 39
        writer.close()


def test_after_a_commit_that_failed_the_next_is_waited_for_twice_as_long():
    """Until commits take less than a quarter of it again."""
    small = [Message("out", b"k", b"v")]
    wait = CommitWait()
    limits = [wait.limit_s(small)]
    for _ in range(4):
        wait.on_failure()
        limits.append(wait.limit_s(small))
    for took_s in (7.0, 2.9, 1.0, 0.5, 0.1):
        wait.on_commit(took_s)
        limits.append(wait.limit_s(small))
    assert limits == pytest.approx([3, 6, 12, 24, 24, 24, 12, 6, 3, 3], abs=1e-3)
    assert wait.limit_s([Message("out", b"k", bytes(1_000_000))]) == pytest.approx(3.1, abs=1e-3)


def test_a_cluster_is_given_the_time_to_replace_a_leader():
    """That is 9 s, the session of a broker. The wait grows from there, and returns to it."""
    small = [Message("out", b"k", b"v")]
    wait = CommitWait(brokers=3)
    assert wait.limit_s(small) == pytest.approx(12, abs=1e-3)
    wait.on_failure()
    assert wait.limit_s(small) == pytest.approx(24, abs=1e-3)
    for _ in range(3):
        wait.on_commit(0.1)
    assert wait.limit_s(small) == pytest.approx(12, abs=1e-3)


def test_offsets_that_cannot_be_committed_are_a_warning_and_no_end(
    caplog: pytest.LogCaptureFixture,
):
    with mock_cluster([]) as address:
        writer = KafkaLog({"bootstrap.servers": address}, "r").writer("a")
        assert not writer.commit_offsets({("nowhere", 0): 1})
        assert "a: its offsets are not shown to lag tools for now" in caplog.text
        writer.close()
