from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from streamrl.stream.log.dead_letters import DeadLetter
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message
from streamrl.stream.processor import processor
from streamrl.stream.processor.circuit_breaker import CircuitBreaker
from streamrl.stream.processor.processor import run_processor
from streamrl.stream.processor.restore import restore
from tests.support.adder import TOPICS, make_processor, number
from tests.support.waiting import patience, until


def letters(topic: str, count: int, cause: str = "broken") -> list[DeadLetter]:
    return [DeadLetter(topic, 0, i, cause, Message("", None, None)) for i in range(count)]


def test_more_than_the_share_of_a_window_trips_and_only_that_topic():
    limit = CircuitBreaker(0.5, window_records=10, pause_s=30)
    assert limit.count(["a"] * 6 + ["b"] * 20, letters("a", 6), 100.0) == []  # no whole window yet
    (sentence,) = limit.count(["a"] * 4, letters("a", 0), 101.0)  # 6 of 10
    assert sentence.startswith(
        "a sends invalid records and is not read for 30 s: 6 of its last 10 records could not be"
        " used, more than 50%, the last because: broken"
    )
    assert (
        limit.paused_topics(101.0) == limit.paused_topics(130.9) == {"a"}
        and limit.paused_topics(131.0) == frozenset()
    )
    assert limit.gauges(121.0) == {"worker/invalid_frac/a": 0.6, "worker/paused_s/a": 10.0}


def test_a_letter_of_a_topic_that_was_not_read_in_this_life_ends_nothing():
    limit = CircuitBreaker(0.5, window_records=10)
    assert limit.count([], letters("a", 1), 0.0) == []
    assert limit.paused_topics(0.0) == frozenset()


def test_a_clock_that_is_set_back_makes_no_longer_pause():
    limit = CircuitBreaker(0.5, window_records=10, pause_s=30)
    limit.count(["a"] * 10, letters("a", 10), 5_000.0)
    assert (
        limit.paused_topics(5_000.0) == {"a"}
        and limit.paused_topics(5_000.0 - 3_600) == frozenset()
    )
    assert limit.gauges(5_000.0 - 3_600)["worker/paused_s/a"] == 0.0


def test_half_is_not_more_than_half():
    limit = CircuitBreaker(0.5, window_records=10)
    assert (
        limit.count(["a"] * 10, letters("a", 5), 0.0) == []
        and limit.paused_topics(0.0) == frozenset()
    )


def test_after_the_pause_it_gets_another_windows_chance():
    limit = CircuitBreaker(0.5, window_records=10, pause_s=30)
    assert limit.count(["a"] * 10, letters("a", 10), 0.0)
    assert (
        limit.count(["a"] * 9, letters("a", 9), 30.0) == []
        and limit.paused_topics(30.0) == frozenset()
    )
    assert limit.count(["a"], letters("a", 1), 31.0) and limit.paused_topics(32.0) == {"a"}
    assert limit.count(["a"] * 10, [], 61.0) == [] and limit.gauges(61.0) == {}  # mended


def test_a_limit_of_one_never_trips():
    limit = CircuitBreaker(1.0, window_records=10)
    assert limit.count(["a"] * 10, letters("a", 10), 0.0) == []


def invalid(count: int) -> Sequence[Message]:
    return [Message("a", b"k", b"\xc1", (("schema", b"env-progress/1"),)) for _ in range(count)]


def test_the_loop_leaves_the_topic_alone_reads_the_others_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The clock of the part is the test's: time passes when it says so."""
    monkeypatch.setattr(
        processor, "CircuitBreaker", lambda max_frac: CircuitBreaker(max_frac, window_records=10)
    )
    log = MemoryLog(TOPICS)
    stop = threading.Event()
    now = [1000.0]
    source = log.producer()
    me = replace(make_processor(), max_invalid_frac=0.5)
    thread = threading.Thread(target=run_processor, args=(log, me, stop, lambda: now[0]))
    with caplog.at_level(logging.WARNING):
        thread.start()
        for message in invalid(12):
            source.send(message)
        until(lambda: "a sends invalid records and is not read for 30 s" in caplog.text)
        until(lambda: log.committed_offsets("adder")["a", 0] == 12)
        for message in (*invalid(5), *(number("b", i) for i in range(5))):
            source.send(message)
        until(lambda: log.committed_offsets("adder")["b", 0] == 5)
        assert log.committed_offsets("adder")["a", 0] == 12
        now[0] += 31
        until(lambda: log.committed_offsets("adder")["a", 0] == 17)
        stop.set()
        thread.join(patience(30))
    # a restart folds what was taken, and asks no breaker
    assert restore(log, me)[0].offsets["a", 0] == 17
