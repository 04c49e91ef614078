"""A read whose end is known comes to an end, whatever the log does meanwhile; and what is asked of
a log (`log/protocol.py`).
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from streamrl.errors import BrokerUnreachable, TopicMissing
from streamrl.log import protocol as protocol
from streamrl.log.memory import MemoryLog
from streamrl.log.protocol import Message, TopicPartition, partitions_of, read
from streamrl.processor.journal import SliceReader
from streamrl.records import Slice


class Vanishing(MemoryLog):
    """Claims more than a reader ever gets, like a broker that goes away while it is read."""

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: offset + 5 for tp, offset in super().end_offsets(partitions).items()}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Vanishing:
    monkeypatch.setattr(protocol, "STALLED_S", 0.1)
    made = Vanishing({"in": 1})
    made.producer().send(Message("in", b"k", b"v"))
    return made


def test_a_read_gives_up_when_nothing_comes(log: Vanishing):
    messages = read(log, "in", 0, 0)
    assert next(messages).value == b"v"
    with pytest.raises(
        BrokerUnreachable,
        match=r"^in\[0\]: nothing has come for 0 s at offset 1 of 6; is the broker up\?",
    ):
        next(messages)


def test_a_journal_is_folded_again_up_to_where_nothing_comes(log: Vanishing):
    with pytest.raises(BrokerUnreachable, match="at offset 1 of 4"):
        SliceReader(log, {"in": ("rollout",)}).read_slice(
            Slice(topic="in", partition=0, start=0, end=4, count=4)
        )


class Counted(MemoryLog):
    """How often it is asked what there is."""

    asked = 0

    def topics(self) -> dict[str, int]:
        self.asked += 1
        return super().topics()


def test_the_partitions_of_many_topics_are_asked_for_once():
    names = [f"in-{i}" for i in range(50)]
    log = Counted({**dict.fromkeys(names, 2), "other": 1})
    assert partitions_of(log, names) == [(name, p) for name in names for p in range(2)]
    assert log.asked == 1
    with pytest.raises(TopicMissing, match="nowhere"):
        partitions_of(log, ["other", "nowhere"])
