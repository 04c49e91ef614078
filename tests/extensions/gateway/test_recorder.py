from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from streamrl.extensions.gateway import recorder
from streamrl.extensions.gateway.follower import Follower
from streamrl.extensions.gateway.recorder import Recorder
from streamrl.extensions.gateway.requests import RequestRejected
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, OnWritten, Output
from streamrl.stream.records import SessionEnd
from tests.support.waiting import eventually, patience

LIMIT_S = patience(20)
END = Output("turns.x", "s", SessionEnd(session="s", time_s=1.0))


class Producer:
    """It gives up the first messages, and puts others to the end of the one partition."""

    def __init__(self, lost: int = 0, end: int = 0) -> None:
        self.sent: list[Message] = []
        self.lost = lost
        self.end = end
        self.is_late = False  # it does not report what it has written
        self.reports: list[Callable[[], None]] = []

    def send(self, message: Message, on_written: OnWritten | None = None) -> None:
        assert on_written is not None
        self.sent.append(message)
        if len(self.sent) <= self.lost:
            on_written(-1, -1)
            return
        self.reports.append(partial(on_written, 0, self.end))
        self.end += 1
        if not self.is_late:
            self.reports[-1]()

    def flush(self, timeout_s: float = 5.0) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "RETRY_INTERVAL_S", 0.0)


def recorder_of(producer: Producer) -> tuple[Recorder, list[Message]]:
    """The recorder, and what its follower has applied."""
    applied: list[Message] = []
    follower = Follower(MemoryLog({"turns.x": 1}), [("turns.x", 0)], applied.extend)
    return Recorder(producer, follower), applied


async def test_a_record_that_is_lost_is_written_again_until_the_log_has_it():
    producer = Producer(lost=3)
    await recorder_of(producer)[0].write_and_wait([END], lambda: True, LIMIT_S)
    assert len(producer.sent) == 4


async def test_a_record_counts_once_the_log_has_it_and_need_not_be_read_back():
    producer = Producer()
    producer.is_late = True
    made, applied = recorder_of(producer)
    applying = asyncio.create_task(made.write_and_wait([END], lambda: len(applied) == 1, LIMIT_S))
    await eventually(lambda: producer.reports)
    assert not applied and not applying.done()
    producer.reports[0]()
    await applying
    assert [(message.partition, message.offset) for message in applied] == [(0, 0)]


async def test_a_record_behind_one_that_has_not_been_read_has_to_wait():
    made, applied = recorder_of(Producer(end=1))
    await made.write_and_wait([END], lambda: True, LIMIT_S)
    assert not applied


async def test_a_record_in_chunks_is_read_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.stream.log.chunks.MESSAGE_BYTES", 10)
    made, applied = recorder_of(Producer())
    await made.write_and_wait([END], lambda: True, LIMIT_S)
    assert not applied


async def test_large_writes_are_one_portion_at_a_time_and_a_small_one_goes_between(
    monkeypatch: pytest.MonkeyPatch,
):
    def session(key: str) -> Output:
        return END._replace(key=key)

    monkeypatch.setattr(recorder, "PORTION_BYTES", 2 * len(to_message(END).value or b""))
    producer = Producer()
    producer.is_late = True
    made, _ = recorder_of(producer)

    async def sent(*keys: str) -> None:
        """Wait until these are sent next, and nothing else, and report all of them."""
        expected = [key.encode() for key in keys]
        await eventually(lambda: len(producer.sent) >= len(keys))
        assert [message.key for message in producer.sent] == expected
        producer.sent.clear()
        for report in producer.reports:
            report()
        producer.reports.clear()

    writes = [
        asyncio.create_task(made.write_and_wait([session(key)] * count, lambda: True, LIMIT_S))
        for key, count in (("first", 3), ("second", 5), ("small", 2))
    ]
    long = Output("turns.x", "long", SessionEnd(session="s" * 500, time_s=1.0))
    writes.append(asyncio.create_task(made.write_and_wait([long], lambda: True, LIMIT_S)))
    await sent("first", "first", "small", "small")
    await sent("first")
    for _ in range(2):
        await sent("second", "second")
    await sent("second")
    await sent("long")
    await asyncio.gather(*writes)


async def test_what_the_producer_has_forgotten_is_written_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "WRITE_AGAIN_S", 0.01)
    producer = Producer()
    producer.is_late = True
    made, _ = recorder_of(producer)
    applying = asyncio.create_task(
        made.write_and_wait([END], lambda: len(producer.sent) >= 2, LIMIT_S)
    )
    await eventually(lambda: len(producer.sent) >= 2)
    producer.reports[1]()
    await applying
    assert {message.key for message in producer.sent} == {b"s"}


async def test_a_log_that_does_not_answer_in_time_is_503():
    producer = Producer()
    producer.is_late = True
    made, _ = recorder_of(producer)
    with pytest.raises(RequestRejected, match="has not answered within 0.01 s") as refused:
        await made.write_and_wait([END], lambda: True, 0.01)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
