"""A read whose end is known comes to an end, whatever the log does meanwhile."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from streamrl.stream.log import reading
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, TopicPartition
from streamrl.stream.log.reading import read, read_partitions
from streamrl.stream.processor.journal import SliceReader
from streamrl.stream.records import Slice
from streamrl.system.errors import BrokerUnreachable


class Vanishing(MemoryLog):
    """Claims more than a reader ever gets, like a broker that goes away while it is read."""

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: offset + 5 for tp, offset in super().end_offsets(partitions).items()}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Vanishing:
    monkeypatch.setattr(reading, "STALLED_S", 0.1)
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


def test_many_partitions_are_read_up_to_their_ends_and_not_further():
    log = MemoryLog({"in": 3})
    for partition in range(3):
        log.append([Message("in", b"k", b"%d" % n, partition=partition) for n in range(4)], True)
    starts = {("in", 0): 2, ("in", 1): 0, ("in", 2): 4}
    ends = {("in", 0): 5, ("in", 1): 3, ("in", 2): 4}
    places = [(m.partition, m.offset) for m in read_partitions(log, starts, ends)]
    assert sorted(places) == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    assert list(read_partitions(log, ends, ends)) == []
