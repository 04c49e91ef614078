"""What a log notes of its part: an in-memory log, and a clock that the test moves."""

from __future__ import annotations

import pytest

from streamrl.stream.log.codec import to_event
from streamrl.stream.log.instrumented import ANSWER_S, PEAK_S, InstrumentedLog, WindowedMax
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Message, beginning_offset, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric

TOPICS = {"in": 2, "out": 1, "metrics": 1, "dead-letters.in": 1}


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def memory() -> MemoryLog:
    return MemoryLog(TOPICS)


@pytest.fixture
def log(memory: MemoryLog, time: Time) -> InstrumentedLog:
    return InstrumentedLog(memory, "buffer", time)


def messages(topic: str, count: int, partition: int = 0) -> list[Message]:
    return [Message(topic, b"k", b"v", partition=partition)] * count


def test_it_is_the_log_that_it_watches(log: InstrumentedLog, memory: MemoryLog):
    writer = log.writer("a")
    writer.commit(messages("out", 2))
    writer.commit_offsets({("in", 0): 5})
    assert log.topics() == memory.topics() and log.committed_offsets("a") == {("in", 0): 5}
    assert (
        beginning_offset(log, "out", 0),
        end_offset(log, "out", 0),
        log.end_offsets([("in", 1)]),
    ) == (0, 3, {("in", 1): 0})
    assert log.beginning_offsets([("out", 0)]) == {("out", 0): 0}
    assert len(list(read(log, "out", 0, 0))) == 2


def test_a_part_has_progressed_with_its_first_transaction_after_it_was_ready(log: InstrumentedLog):
    writer = log.writer("a")
    writer.commit(messages("out", 1))
    assert not log.has_progressed
    log.mark_ready()
    assert not log.has_progressed
    writer.commit(messages("out", 1))
    assert log.has_progressed


def test_a_part_without_transactions_has_progressed_when_it_was_ready_ten_minutes_ago(
    log: InstrumentedLog, time: Time
):
    time.now += 600.0
    assert not log.has_progressed
    log.mark_ready()
    time.now += 599.0
    log.mark_ready(False)
    log.mark_ready()
    assert not log.has_progressed
    time.now += 1.0
    assert log.has_progressed


def test_lag_is_what_lies_before_the_ends_last_seen(log: InstrumentedLog, memory: MemoryLog):
    reader = log.reader({("in", 0): 0, ("in", 1): 0})
    assert log.metrics()["part/lag_records/in"] == 0
    memory.append(messages("in", 3), marker=False)
    memory.append(messages("in", 2, 1), marker=False)
    log.refresh_end_offsets()
    assert log.metrics()["part/lag_records/in"] == 5
    reader.poll(4, 0)
    own = log.metrics()
    assert (own["part/lag_records/in"], own["part/read_records/in"]) == (1, 4)
    reader.close()
    assert "part/lag_records/in" not in log.metrics()


def test_transactions_are_timed_and_their_records_counted(
    log: InstrumentedLog, memory: MemoryLog, time: Time, monkeypatch: pytest.MonkeyPatch
):
    writer = log.writer("buffer")
    real = MemoryLog.commit
    log.reader({("in", 0): 0})
    # a first one is one more
    assert log.metrics()["part/dead_letters/in"] == 0 and log.metrics()["part/transactions"] == 0

    def slow(*arguments: object) -> int:
        time.now += 0.25
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryLog, "commit", slow)
    writer.commit([*messages("out", 2), *messages("dead-letters.in", 1)])
    time.now += 2.0
    own = log.metrics()
    assert (
        own["part/transactions"],
        own["part/transactions_s"],
        own["part/transaction_s"],
        own["part/transaction_max_s"],
    ) == (1, 0.25, 0.25, 0.25)
    assert (
        own["part/written_records/out"],
        own["part/dead_letters/in"],
        own["part/since_transaction_s"],
    ) == (2, 1, 2.0)


def test_a_peak_is_shown_for_half_a_minute_at_least_and_a_minute_at_most():
    peak = WindowedMax(PEAK_S)
    for time_s, value in ((1000.0, 0.1), (1001.0, 5.0), (1002.0, 0.2)):
        peak.add(value, time_s)
    assert peak.value(1001.0 + PEAK_S) == 5.0
    peak.add(0.3, 1035.0)
    assert peak.value(1035.0) == 5.0 and peak.value(1065.0) == 0.3 and peak.value(2000.0) == 0.0


def test_ready_is_restored_connected_and_caught_up(
    log: InstrumentedLog, memory: MemoryLog, time: Time
):
    memory.append(messages("in", 3), marker=False)
    assert log.readiness_problems() == [
        "its state is not restored yet",
        "the broker does not answer",
    ]
    reader = log.reader({("in", 0): 0})
    log.mark_ready()
    assert log.readiness_problems()[-1] == "it does not know its lag yet"
    log.refresh_end_offsets()
    assert log.readiness_problems() == ["3 records that were there at its start are not read"]
    reader.poll(2, 0)
    assert log.readiness_problems() == ["1 records that were there at its start are not read"]
    reader.poll(2, 0)
    assert log.readiness_problems() == [] and log.metrics()["part/ready"] == 1
    memory.append(messages("in", 9), marker=False)
    log.refresh_end_offsets()
    assert log.readiness_problems() == []  # that is load
    time.now += ANSWER_S + 1
    assert log.readiness_problems() == ["the broker does not answer"]
    log.refresh_end_offsets()
    log.mark_ready(False)
    assert log.readiness_problems() == ["its state is not restored yet"]


def test_what_a_part_has_chosen_not_to_read_does_not_keep_it_from_being_ready(
    log: InstrumentedLog, memory: MemoryLog
):
    memory.append(messages("in", 3), marker=False)
    reader = log.reader({("in", 0): 0})
    log.mark_ready()
    log.refresh_end_offsets()
    reader.set_paused({"in"})
    assert log.readiness_problems() == []


def test_a_broker_that_does_not_answer_is_no_error_here(log: InstrumentedLog):
    log.reader({("in", 0): 0})
    log._readers[0].partitions = (("gone", 0),)  # pyright: ignore[reportPrivateUsage]
    log.refresh_end_offsets()
    assert "the broker does not answer" in log.readiness_problems()


def test_a_part_turns_when_it_uses_its_log(log: InstrumentedLog, time: Time):
    reader = log.reader({("in", 0): 0})
    writer = log.writer("a")
    meter = Meter(log, "a")
    for use in (
        lambda: reader.poll(1, 0),
        lambda: writer.commit([]),
        lambda: meter.publish({"worker/process_latency_s": 1.0}),
    ):
        time.now += 7
        assert log.since_activity_s == 7
        use()
        assert log.since_activity_s == 0


def test_reports_take_each_others_place_and_steps_stay(log: InstrumentedLog):
    meter = Meter(log, "batcher")
    meter.publish({"batcher/missing_tokens/copy": 9.0, "worker/process_latency_s": 1.0})
    meter.publish({"worker/process_latency_s": 2.0})  # nothing is missing any more
    meter.publish({"batches/copy/reward/mean": 0.5}, step=3)
    meter.publish({"batcher/tokens_total": 7.0}, step=4)
    assert log.reports == {"batcher": {"worker/process_latency_s": 2.0}}
    assert log.steps == {
        ("batcher", "batches/copy/reward/mean"): 0.5,
        ("batcher", "batcher/tokens_total"): 7.0,
    }


def test_its_own_numbers_lie_in_the_topic_behind_those_of_the_part_once_a_second(
    log: InstrumentedLog, memory: MemoryLog, time: Time
):
    log.reader({("in", 0): 0})
    meter = Meter(log, "env-copy-0")
    for _ in range(3):
        time.now += 0.5
        meter.publish({"env/failed": 0.0})
    found = [to_event(message, ("metric",)).record for message in read(memory, "metrics", 0, 0)]
    assert [type(record) for record in found] == [Metric] * 5
    assert [
        "part/since_activity_s" in record.values for record in found if isinstance(record, Metric)
    ] == [False, True, False, False, True]
    assert {record.source for record in found if isinstance(record, Metric)} == {
        "env-copy-0",
        "buffer",
    }


def test_readiness_of_a_plain_log_is_nobodys_business(memory: MemoryLog):
    memory.mark_ready()
