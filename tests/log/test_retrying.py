"""A transaction that failed is found or committed again, and a fence is told from a rival: on the
log in memory, with writers that fail as told.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import pytest
from confluent_kafka import Producer

from streamrl.errors import BrokerUnreachable, Fenced, TransactionFailed
from streamrl.log import retrying
from streamrl.log.kafka import KafkaLog
from streamrl.log.memory import MemoryLog, MemoryWriter
from streamrl.log.protocol import Log, Message, Offsets, TopicPartition
from streamrl.log.reading import read
from streamrl.log.retrying import RetryingWriter
from tests.support.kafka import make_topics
from tests.support.waiting import until

OUT = Message("out", b"k", b"rollout")


class FailingLog(MemoryLog):
    """`fails` says how each of the next commits goes: "lost" fails before it commits, "unanswered"
    behind it, "fenced" as by the broker.
    """

    def __init__(self, *fails: str) -> None:
        super().__init__({"out": 1, "journal.a": 1})
        self.fails = list(fails)
        self.opened = 0

    def writer(self, identity: str, changelog_topic: str = "") -> MemoryWriter:
        self.opened += 1
        if self.opened > 1 and self.fails and self.fails[0] == "unreachable":
            self.fails.pop(0)
            raise BrokerUnreachable("no Kafka broker answers")
        return FailingWriter(self, super().writer(identity))


class FailingWriter(MemoryWriter):
    def __init__(self, log: FailingLog, writer: MemoryWriter) -> None:
        super().__init__(log, writer._identity, writer._epoch)
        self._failing = log

    def commit(self, messages: Sequence[Message]) -> int:
        how = self._failing.fails.pop(0) if self._failing.fails else ""
        if how == "fenced":
            raise Fenced(
                "a: another process with this identity has taken over; stop one of the two"
            )
        offset = super().commit(messages) if how != "lost" else -1
        if how:
            raise TransactionFailed(f"a: transaction failed ({how})")
        return offset

    def commit_offsets(self, offsets: Offsets, wait: bool = True) -> bool:
        return True


def entry(value: bytes) -> Message:
    return Message("journal.a", b"a", value)


def written(log: Log, topic: str) -> list[bytes | None]:
    return [message.value for message in read(log, topic, 0, 0)]


@pytest.mark.parametrize(
    "fails",
    [["lost"], ["unanswered"], ["lost", "unreachable", "lost"], ["fenced"], ["lost", "unanswered"]],
)
def test_each_transaction_is_in_the_log_once_whatever_failed(
    fails: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retrying, "RIVAL_S", 0.0)
    monkeypatch.setattr(retrying, "RETRY_INTERVAL_S", 0.0)
    log = FailingLog()
    writer = RetryingWriter(log, "a", "journal.a")
    writer.commit([OUT, entry(b"0")])
    log.fails[:] = fails
    writer.commit([OUT, entry(b"1")])
    assert not log.fails
    offset = writer.commit([OUT, entry(b"2")])
    assert written(log, "journal.a") == [b"0", b"1", b"2"]
    assert len(written(log, "out")) == 3
    assert [message.value for message in read(log, "journal.a", 0, offset)] == [b"2"]


def test_a_process_that_was_taken_over_leaves_and_writes_nothing():
    log = FailingLog()
    first = RetryingWriter(log, "a", "journal.a")
    RetryingWriter(log, "a", "journal.a").commit([OUT, entry(b"rival")])
    with pytest.raises(Fenced, match="another process"):
        first.commit([OUT, entry(b"mine")])
    assert written(log, "journal.a") == [b"rival"]


def test_a_process_that_was_taken_over_can_find_out_before_it_writes(
    monkeypatch: pytest.MonkeyPatch,
):
    log = FailingLog()
    first = RetryingWriter(log, "a", "journal.a")
    key = entry(b"").key
    assert key is not None
    first.commit([OUT, entry(b"mine")])
    first.check_rival(key.decode())
    RetryingWriter(log, "a", "journal.a").commit([OUT, entry(b"rival")])
    first.check_rival("b")
    calls = list[int]()

    def away_once(
        self: MemoryLog, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        calls.append(1)
        if len(calls) == 1:
            raise BrokerUnreachable("no Kafka broker answers")
        return end_offsets(self, partitions)

    end_offsets = MemoryLog.end_offsets
    monkeypatch.setattr(MemoryLog, "end_offsets", away_once)
    with pytest.raises(Fenced, match="another process"):
        first.check_rival(key.decode())
    assert len(calls) > 1


def test_after_its_patience_a_fence_without_a_rival_asks_for_a_restart(
    monkeypatch: pytest.MonkeyPatch,
):
    """The broker fences a process that was suspended within a transaction. No other process has the
    identity, so its supervisor may start it again.
    """
    monkeypatch.setattr(retrying, "RIVAL_S", 0.05)
    log = FailingLog("fenced")
    with pytest.raises(TransactionFailed, match="stood still for too long; start again"):
        RetryingWriter(log, "a", "journal.a", patience_s=0.0).commit([entry(b"0")])
    assert log.opened == 1


def test_records_of_others_in_the_same_memory_are_no_rivals():
    log = FailingLog()
    writer = RetryingWriter(log, "learner-x", "journal.a")
    log.writer("learner-y").commit([Message("journal.a", b"y", b"version 1")])
    log.fails = ["lost"]
    writer.commit([Message("journal.a", b"x", b"version 1")])
    assert written(log, "journal.a") == [b"version 1", b"version 1"]


def test_it_gives_up_when_it_is_told_to_stop_and_says_what_failed_first():
    log = FailingLog("lost")
    stop = threading.Event()
    stop.set()
    with pytest.raises(TransactionFailed, match="lost"):
        RetryingWriter(log, "a", "journal.a", stop=stop).commit([entry(b"0")])


def test_a_transaction_that_its_memory_does_not_show_is_refused():
    with pytest.raises(ValueError, match="^a: put the journal.a record last"):
        RetryingWriter(FailingLog(), "a", "journal.a").commit([entry(b"0"), OUT])


def test_on_a_broker_a_producer_that_was_fenced_by_nobody_is_replaced(
    broker: str, run_name: str, monkeypatch: pytest.MonkeyPatch
):
    """`init_transactions` of another client bumps the epoch of the identity, as the broker does
    when a transaction has timed out.
    """
    monkeypatch.setattr(retrying, "RIVAL_S", 0.1)
    make_topics(broker, {f"{run_name}.out": 1, f"{run_name}.journal.a": 1})
    log = KafkaLog({"bootstrap.servers": broker}, run_name)
    writer = RetryingWriter(log, "a", "journal.a")
    writer.commit([OUT, entry(b"0")])
    Producer({"bootstrap.servers": broker, "transactional.id": f"{run_name}.a"}).init_transactions(
        10
    )
    writer.commit([OUT, entry(b"1")])
    until(lambda: written(log, "journal.a") == [b"0", b"1"] and len(written(log, "out")) == 2)
    writer.close()
