"""Ranges of many partitions, read in turns by one reader."""

from __future__ import annotations

import pytest

from streamrl.stream.log import partitions_reader
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.partitions_reader import SKIP_RECORDS, PartitionsReader
from streamrl.stream.log.protocol import Message, Offsets, Reader, TopicPartition


class Counting(MemoryLog):
    """Counts the readers that are opened, and notes where each is moved to."""

    def __init__(self, topics: dict[str, int], count: int) -> None:
        super().__init__(topics)
        self.opened = 0
        self.moved = list[tuple[str, int, int]]()
        for topic, partitions in topics.items():
            for partition in range(partitions):
                self.append(
                    [Message(topic, b"k", b"%d" % n, partition=partition) for n in range(count)],
                    marker=False,
                )

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        self.opened += 1
        reader = super().reader(offsets, whole, bounded)
        seek = reader.seek

        def noted(offsets: Offsets) -> None:
            self.moved += [(*tp, offset) for tp, offset in offsets.items()]
            seek(offsets)

        reader.seek = noted
        return reader


def offsets(reader: PartitionsReader, tp: TopicPartition, start: int, last: int) -> list[int]:
    return [message.offset for message in reader.read(tp, start, last)]


def test_partitions_that_are_read_in_turns_take_one_reader_and_a_move_each():
    log = Counting({"rollouts.a": 2, "rollouts.b": 1, "demand": 1}, 6)
    reader = PartitionsReader(log)
    for start in (0, 3):
        for tp in (("rollouts.a", 0), ("rollouts.a", 1), ("rollouts.b", 0)):
            assert offsets(reader, tp, start, start + 2) == [start, start + 1, start + 2]
    assert log.opened == 1
    assert log.moved == [("rollouts.a", 0, 0), ("rollouts.a", 1, 0), ("rollouts.b", 0, 0)]
    assert offsets(reader, ("demand", 0), 1, 1) == [1]
    assert log.opened == 2, "another kind of topic"
    reader.close()


def test_what_was_read_ahead_takes_one_reader_for_all_partitions_and_no_move():
    log = Counting({"rollouts.a": 2, "rollouts.b": 1}, 6)
    reader = PartitionsReader(log)
    starts = {("rollouts.a", 0): 1, ("rollouts.a", 1): 0, ("rollouts.b", 0): 5}
    reader.read_ahead(starts, {("rollouts.a", 0): 4, ("rollouts.a", 1): 6, ("rollouts.b", 0): 6})
    assert offsets(reader, ("rollouts.a", 1), 0, 5) == [*range(6)]
    assert offsets(reader, ("rollouts.b", 0), 5, 5) == [5]
    assert offsets(reader, ("rollouts.a", 0), 1, 3) == [1, 2, 3]
    assert log.moved == [] and log.opened == 2
    assert offsets(reader, ("rollouts.a", 0), 4, 5) == [4, 5], "what was not read ahead"
    assert log.moved == [("rollouts.a", 0, 4)]


def test_reading_ahead_continues_after_what_was_read_and_ends_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(partitions_reader, "AHEAD_BYTES", 4)
    log = Counting({"in": 1}, 6)
    reader = PartitionsReader(log)
    for start in (0, 2):
        reader.read_ahead({("in", 0): start}, {("in", 0): start + 4})
        assert offsets(reader, ("in", 0), start, start + 1) == [start, start + 1]
    assert log.moved == []
    assert offsets(reader, ("in", 0), 4, 5) == [4, 5]


def test_what_does_not_fit_is_read_again(monkeypatch: pytest.MonkeyPatch):
    """Each partition has six messages of two bytes, and three of them are read in one turn."""
    monkeypatch.setattr(partitions_reader, "AHEAD_BYTES", 9)
    log = Counting({"in": 3}, 6)
    reader = PartitionsReader(log)
    for start in (0, 3):
        for partition in range(3):
            assert offsets(reader, ("in", partition), start, start + 2) == list(
                range(start, start + 3)
            )
    # What was ahead of 0 and of 1 was dropped when 1 and 2 were read.
    assert log.moved == [
        ("in", 0, 0),
        ("in", 1, 0),
        ("in", 2, 0),
        ("in", 0, 3),
        ("in", 1, 3),
        ("in", 2, 3),
    ]


def test_a_long_gap_is_not_read_and_a_range_before_the_last_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(partitions_reader, "FETCH_BYTES", 1)  # so 500 messages are read ahead
    log = Counting({"in": 1}, 2 * SKIP_RECORDS)
    reader = PartitionsReader(log)
    assert offsets(reader, ("in", 0), 5, 6) == [5, 6]
    assert log.moved == [("in", 0, 5)]
    assert offsets(reader, ("in", 0), 400, 400) == [400]
    far = 506 + SKIP_RECORDS
    assert offsets(reader, ("in", 0), far, far) == [far]
    assert log.moved[1:] == [("in", 0, far)]
    assert offsets(reader, ("in", 0), 6, 7) == [6, 7]


def test_a_range_whose_last_records_are_markers_ends_at_the_end():
    log = MemoryLog({"in": 1})
    log.writer("one").commit([Message("in", b"k", b"0")])
    assert offsets(PartitionsReader(log), ("in", 0), 0, 1) == [0]


def test_what_retention_has_left_is_read_from_its_beginning():
    log = Counting({"in": 1}, 6)
    log.delete_before({("in", 0): 4})
    assert offsets(PartitionsReader(log), ("in", 0), 3, 5) == [4, 5]
