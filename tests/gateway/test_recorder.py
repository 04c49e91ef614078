from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamrl.errors import BrokerUnreachable
from streamrl.gateway import recorder
from streamrl.gateway.follower import Follower
from streamrl.gateway.recorder import Recorder, limited
from streamrl.gateway.requests import RequestRefused
from streamrl.log.memory import MemoryLog
from streamrl.log.protocol import Message, Output
from streamrl.records import SessionEnd

END = Output("turns.x", "s", SessionEnd(session="s", time_s=1.0))


class Producer:
    """It delivers once the broker is there again."""

    def __init__(self, absent: int = 0) -> None:
        self.sent: list[Message] = []
        self.flushes = 0
        self.absent = absent

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def flush(self, timeout_s: float = 5.0) -> None:
        self.flushes += 1
        if self.flushes <= self.absent:
            raise BrokerUnreachable("nobody answers")

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "RETRY_INTERVAL_S", 0.0)


def recorder_of(producer: Producer) -> tuple[Recorder, Follower]:
    log = MemoryLog({"turns.x": 1})
    follower = Follower(log, [("turns.x", 0)], lambda messages: None)
    return Recorder(producer, follower), follower


async def test_a_record_is_written_once_however_long_the_broker_is_away():
    producer = Producer(absent=3)
    await recorder_of(producer)[0].write(END)
    assert (len(producer.sent), producer.flushes) == (1, 4)


async def test_what_the_producer_has_forgotten_is_written_again(monkeypatch: pytest.MonkeyPatch):
    """The follower does not read the first one: it was never delivered."""
    monkeypatch.setattr(recorder, "WRITE_AGAIN_S", 0.01)
    producer = Producer()
    made, _ = recorder_of(producer)
    applying = asyncio.create_task(made.apply([END], lambda: len(producer.sent) >= 2))
    while len(producer.sent) < 2:
        await asyncio.sleep(0)
    await applying
    assert {message.key for message in producer.sent} == {b"s"}


async def test_a_log_that_does_not_answer_in_time_is_503():
    with pytest.raises(RequestRefused, match="has not answered within 0 s") as refused:
        async with limited(0.0):
            never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            await never
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
