from __future__ import annotations

import pytest

from streamrl.stream.log.instrumented import InstrumentedLog
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import end_offset
from streamrl.stream.processor.part import open_part


class Writer:
    """Notes when it is closed."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def close(self) -> None:
        self._order.append("writer")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    closed = list[str]()
    monkeypatch.setattr(Meter, "close", lambda self: closed.append("meter"))
    return closed


def test_writer_and_meter_are_closed_also_after_an_error(order: list[str]):
    with (
        pytest.raises(RuntimeError, match="died"),
        open_part(MemoryLog({"metrics": 1}), "buffer", Writer(order)) as part,  # pyright: ignore
    ):
        assert part.name == "buffer" and order == []
        raise RuntimeError("died")
    assert order == ["meter", "writer"]


def test_a_part_without_transactions_has_a_meter(order: list[str]):
    log = MemoryLog({"metrics": 1})
    with open_part(log, "inference-0", writer=None) as part:
        part.meter.publish({"inference/in_flight": 1.0})
    assert end_offset(log, "metrics", 0) == 1
    assert order == ["meter"]


def test_a_part_says_when_it_is_ready():
    log = InstrumentedLog(MemoryLog({"metrics": 1}), "buffer")
    with open_part(log, "buffer", writer=None) as part:
        assert not log.is_ready
        part.mark_ready()
        assert log.is_ready
        part.mark_ready(False)
        assert not log.is_ready
