"""A transaction that failed is found or committed again, and a fence is told from a rival: on the
log in memory, with writers that fail as told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import pytest
from confluent_kafka import Producer

from streamrl.stream.log import retrying
from streamrl.stream.log.claims import is_claim
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.memory import MemoryLog, MemoryWriter
from streamrl.stream.log.protocol import Log, Message, Offsets, TopicPartition
from streamrl.stream.log.reading import read
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.system.errors import BrokerUnreachable, Fenced, TransactionFailed
from tests.support.kafka import make_topics
from tests.support.waiting import patience, until

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
    monkeypatch.setattr(retrying, "CLAIM_S", 0.0)
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


def test_a_process_that_was_replaced_ends_and_its_successor_continues():
    log = FailingLog()
    first = RetryingWriter(log, "a", "journal.a")
    first.commit([OUT, entry(b"first")])
    second = RetryingWriter(log, "a", "journal.a")
    with pytest.raises(Fenced, match="^a: another process"):
        first.commit([OUT, entry(b"late")])
    with pytest.raises(Fenced, match="^a: another process"):
        first.commit([OUT, entry(b"later")])
    second.commit([OUT, entry(b"second")])
    assert written(log, "journal.a") == [b"first", b"second"]
    assert log.opened == 2, "the first has not opened a producer again"


@pytest.mark.parametrize("how", ["lost", "unanswered", "fenced"])
def test_a_claim_whose_transaction_fails_is_made_once(how: str):
    log = FailingLog(how)
    writer = RetryingWriter(log, "a", "journal.a")
    claims = list(filter(is_claim, read(log, "journal.a", 0, whole=False)))
    assert [claim.key for claim in claims] == [b"a"]
    writer.commit([entry(b"0")])
    assert written(log, "journal.a") == [b"0"]


def test_a_writer_that_cannot_claim_its_identity_is_closed(monkeypatch: pytest.MonkeyPatch):
    closed = list[MemoryWriter]()
    monkeypatch.setattr(FailingWriter, "close", lambda writer: closed.append(writer))
    with pytest.raises(TransactionFailed, match="lost"):
        RetryingWriter(FailingLog("lost"), "a", "journal.a", patience_s=0.0)
    assert len(closed) == 1


class StagedLog(FailingLog):
    """`before_open` is called once before the next writer is opened, and `after_open` after it."""

    before_open: Callable[[], object] | None = None
    after_open: Callable[[], object] | None = None

    def writer(self, identity: str, changelog_topic: str = "") -> MemoryWriter:
        before, self.before_open = self.before_open, None
        if before is not None:
            before()
        made = super().writer(identity, changelog_topic)
        after, self.after_open = self.after_open, None
        if after is not None:
            after()
        return made


def test_a_process_that_starts_while_another_opens_its_producer_again_replaces_it():
    """The first has found no claim, then the second starts, then the first opens its producer,
    which fences that of the second.
    """
    log = StagedLog()
    first = RetryingWriter(log, "a", "journal.a")
    started = list[RetryingWriter]()
    log.before_open = lambda: started.append(RetryingWriter(log, "a", "journal.a"))
    log.fails = ["lost"]
    with pytest.raises(Fenced, match="another process"):
        first.commit([OUT, entry(b"first")])
    (second,) = started
    second.commit([OUT, entry(b"second")])
    assert written(log, "journal.a") == [b"second"]


def test_a_process_that_is_fenced_before_its_claim_claims_again(monkeypatch: pytest.MonkeyPatch):
    """The second has opened its producer and claims nothing for long, so the first, which is
    fenced, takes the broker for the cause.
    """
    monkeypatch.setattr(retrying, "CLAIM_S", 0.0)
    log = StagedLog()
    first = RetryingWriter(log, "a", "journal.a")
    log.after_open = lambda: first.commit([OUT, entry(b"first")])
    second = RetryingWriter(log, "a", "journal.a")
    with pytest.raises(Fenced, match="another process"):
        first.commit([OUT, entry(b"late")])
    second.commit([OUT, entry(b"second")])
    assert written(log, "journal.a") == [b"first", b"second"]


def test_a_process_that_was_fenced_waits_for_the_claim_of_the_next_one():
    """The second has opened its producer, and needs a while until it claims."""
    log = StagedLog()
    first = RetryingWriter(log, "a", "journal.a")
    errors = list[Fenced]()

    def commit_late() -> None:
        try:
            first.commit([OUT, entry(b"late")])
        except Fenced as error:
            errors.append(error)

    late = threading.Thread(target=commit_late)
    looks = list[int]()

    def counted(
        self: MemoryLog, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        if threading.current_thread() is late:
            looks.append(1)
        return end_offsets(self, partitions)

    def stage() -> None:
        late.start()
        until(lambda: len(looks) >= 2)

    end_offsets = MemoryLog.end_offsets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryLog, "end_offsets", counted)
        log.after_open = stage
        second = RetryingWriter(log, "a", "journal.a")
        late.join(patience(10))
    assert [str(error)[:18] for error in errors] == ["a: another process"]
    second.commit([OUT, entry(b"second")])
    assert written(log, "journal.a") == [b"second"]
    assert log.opened == 2


def test_of_two_processes_that_start_at_the_same_time_one_ends():
    """The second starts and claims after the first has opened its producer."""
    log = StagedLog()
    started = list[RetryingWriter]()
    log.after_open = lambda: started.append(RetryingWriter(log, "a", "journal.a"))
    first = RetryingWriter(log, "a", "journal.a")
    (second,) = started
    with pytest.raises(Fenced, match="another process"):
        second.commit([OUT, entry(b"second")])
    first.commit([OUT, entry(b"first")])
    assert written(log, "journal.a") == [b"first"]


def test_a_process_that_was_replaced_can_find_out_before_it_writes(
    monkeypatch: pytest.MonkeyPatch,
):
    log = FailingLog()
    first = RetryingWriter(log, "a", "journal.a")
    first.commit([OUT, entry(b"mine")])
    RetryingWriter(log, "b", "journal.a")
    first.check_rival()
    RetryingWriter(log, "a", "journal.a")
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
        first.check_rival()
    assert len(calls) > 1


def test_after_its_patience_a_fence_without_a_rival_asks_for_a_restart():
    """The broker fences a process that was suspended within a transaction. No other process has the
    identity, so its supervisor may start it again.
    """
    log = FailingLog()
    writer = RetryingWriter(log, "a", "journal.a", patience_s=0.0)
    log.fails = ["fenced"]
    with pytest.raises(TransactionFailed, match="was idle for too long; start again"):
        writer.commit([entry(b"0")])
    assert log.opened == 1


def test_records_of_others_in_the_same_memory_are_no_rivals():
    log = FailingLog()
    writer = RetryingWriter(log, "learner-x", "journal.a")
    log.writer("learner-y").commit([Message("journal.a", b"y", b"version 1")])
    log.fails = ["lost"]
    writer.commit([Message("journal.a", b"x", b"version 1")])
    assert written(log, "journal.a") == [b"version 1", b"version 1"]


def test_it_gives_up_when_it_is_told_to_stop_and_says_what_failed_first():
    log = FailingLog()
    stop = threading.Event()
    writer = RetryingWriter(log, "a", "journal.a", stop=stop)
    log.fails = ["lost"]
    stop.set()
    with pytest.raises(TransactionFailed, match="lost"):
        writer.commit([entry(b"0")])


def test_a_transaction_that_its_memory_does_not_show_is_refused():
    with pytest.raises(ValueError, match="^a: put the journal.a record last"):
        RetryingWriter(FailingLog(), "a", "journal.a").commit([entry(b"0"), OUT])


def test_on_a_broker_a_producer_that_was_fenced_by_nobody_is_replaced(
    broker: str, run_name: str, monkeypatch: pytest.MonkeyPatch
):
    """`init_transactions` of another client bumps the epoch of the identity, as the broker does
    when a transaction has timed out.
    """
    monkeypatch.setattr(retrying, "CLAIM_S", 0.1)
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


def test_on_a_broker_a_process_that_was_replaced_does_not_take_its_identity_back(
    broker: str, run_name: str
):
    """The new process has started and written nothing yet when the old one wakes up."""
    make_topics(broker, {f"{run_name}.out": 1, f"{run_name}.journal.a": 1})
    log = KafkaLog({"bootstrap.servers": broker}, run_name)
    old = RetryingWriter(log, "a", "journal.a")
    old.commit([OUT, entry(b"old")])
    new = RetryingWriter(log, "a", "journal.a")
    with pytest.raises(Fenced, match="^a: another process"):
        old.commit([OUT, entry(b"late")])
    new.commit([OUT, entry(b"new")])
    until(lambda: written(log, "journal.a") == [b"old", b"new"] and len(written(log, "out")) == 2)
    old.close()
    new.close()
