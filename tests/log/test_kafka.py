"""What only Kafka has: offset commits that take no memory, errors without a topic, limits that
follow bytes.
"""

from __future__ import annotations

import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from streamrl.errors import AccessDenied, BrokerUnreachable, TransactionFailed
from streamrl.log import kafka
from streamrl.log.kafka import MAX_UNANSWERED, KafkaLog
from streamrl.log.protocol import Message
from tests.support.mock_cluster import mock_cluster
from tests.support.waiting import until


def test_offset_commits_that_are_not_answered_yet_do_not_pile_up():
    """A part commits its offsets once a second for as long as it runs: 10^6 of them are 12 days."""
    with mock_cluster(["r.in"]) as address:
        writer = KafkaLog({"bootstrap.servers": address}, "r").writer("a")
        until(lambda: writer.commit_offsets({("in", 0): 0}))
        sent = 0
        for offset in range(2_000):
            sent += writer.commit_offsets({("in", 0): offset}, wait=False)
            assert writer._committer.unanswered <= MAX_UNANSWERED and not writer._committer.answers
        assert sent >= MAX_UNANSWERED
        until(lambda: writer.commit_offsets({("in", 0): 2_000}))
        assert writer._committer.unanswered == 0 and writer._committer.consumer.poll(0.0) is None
        writer.close()


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

    monkeypatch.setattr(kafka, "START_TIMEOUT_S", 0.0)  # of each attempt
    monkeypatch.setattr(kafka, "Producer", BusyProducer)
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
            (1e6, [part], False),
        ):
            writer._producer = SlowProducer(bytes_per_s)
            with (
                nullcontext()
                if goes_through
                else pytest.raises(TransactionFailed, match="still to be sent")
            ):
                assert writer.commit(messages) == 39
        writer.close()


def test_offsets_that_cannot_be_committed_are_a_warning_and_no_end(
    caplog: pytest.LogCaptureFixture,
):
    with mock_cluster([]) as address:
        writer = KafkaLog({"bootstrap.servers": address}, "r").writer("a")
        assert not writer.commit_offsets({("nowhere", 0): 1})
        assert "a: its offsets are not shown to lag tools for now" in caplog.text
        writer.close()


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


def test_an_end_is_asked_for_again_while_a_partition_has_no_leader(
    monkeypatch: pytest.MonkeyPatch,
):
    """What librdkafka answers in the first moments of a broker that was killed: an error that no
    leader is found, a leader of another epoch, and -1001 with no error at all.
    """
    answers: list[KafkaError | int] = [
        KafkaError(KafkaError._NOENT),
        KafkaError(KafkaError.FENCED_LEADER_EPOCH),
        -1001,
        7,
    ]

    class Answers:
        def list_offsets(self, asked: Any, **options: Any) -> Any:
            answer = answers.pop(0)
            return {tp: SimpleNamespace(result=lambda: result_of(answer)) for tp in asked}

    def result_of(answer: KafkaError | int) -> Any:
        if isinstance(answer, KafkaError):
            raise KafkaException(answer)
        return SimpleNamespace(offset=answer)

    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, "run")
    monkeypatch.setattr(log, "_admin", Answers())
    monkeypatch.setattr(log, "_require", lambda topics: None)
    assert log.end_offsets([("turns.agent", 0)]) == {("turns.agent", 0): 7}
    assert not answers


def test_committed_offsets_that_a_broker_cannot_tell_are_no_beginning(
    monkeypatch: pytest.MonkeyPatch,
):
    found = SimpleNamespace(topic="run.turns", partition=0, offset=-1001, error=None)
    found.error = KafkaError(KafkaError.NOT_COORDINATOR)

    class Group:
        def __init__(self, settings: Any) -> None: ...

        def committed(self, asked: Any, timeout: float) -> Any:
            answer = SimpleNamespace(**vars(found))
            found.error = None
            found.offset = 5
            return [answer]

        def close(self) -> None: ...

    monkeypatch.setattr(kafka, "Consumer", Group)
    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, "run")
    monkeypatch.setattr(log, "topics", lambda: {"turns": 1})
    assert log.committed_offsets("assembler") == {("turns", 0): 5}


def test_whoever_waits_for_a_message_is_told_that_it_could_not_be_delivered(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kafka, "DELIVERY_LIMIT_S", 0.2)
    places: list[tuple[int, int]] = []
    with socket.socket() as nobody:  # listens there
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        producer = KafkaLog({"bootstrap.servers": address}, "r").producer(durable=True)
        producer.send(Message("in", b"k", b"v"), lambda *place: places.append(place))
        until(lambda: places == [(-1, -1)])
        producer.close()
