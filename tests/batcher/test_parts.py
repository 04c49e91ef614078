"""Batches in parts, as earlier versions of streamrl wrote them, and how they are read today."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.batcher.assemble import assemble
from streamrl.batcher.parts import split_batch
from streamrl.log.codec import encode, to_event, to_message
from streamrl.log.memory import MemoryLog
from streamrl.log.protocol import Output
from streamrl.log.reading import read
from streamrl.records import Batch, BatchPart
from tests.support.build import group


def make() -> Batch:
    batch = assemble([group(sizes=(30, 30))], 7, 0, row_count=1, max_seq_len=64)
    assert batch is not None
    return batch


def parts() -> list[BatchPart]:
    return [part for part in split_batch(make(), limit_bytes=200) if isinstance(part, BatchPart)]


def log_of(*records: Batch | BatchPart) -> MemoryLog:
    log = MemoryLog({"batches": 1})
    log.writer("batcher").commit([to_message(Output("batches", "7", record)) for record in records])
    return log


def batches(log: MemoryLog, start: int = 0) -> list[tuple[int, bytes]]:
    """Offsets and bytes of the batches that a reader finds from an offset on."""
    events = [to_event(message, ("batch",)) for message in read(log, "batches", 0, start)]
    return [(e.offset, encode(e.record)) for e in events if isinstance(e.record, Batch)]


def test_a_small_batch_was_one_record():
    assert [encode(record) for record in split_batch(make())] == [encode(make())]


def test_a_large_one_was_several_and_is_read_whole_wherever_a_reader_begins():
    pieces = parts()
    log = log_of(*pieces, make())
    last = len(pieces) - 1
    assert last >= 2
    whole = [(last, encode(make())), (last + 1, encode(make()))]
    for start in range(len(pieces)):
        assert batches(log, start) == whole
    assert batches(log, len(pieces)) == whole[1:]


@pytest.mark.parametrize("cut", [slice(2, None), slice(2)], ids=["by retention", "by its writer"])
def test_behind_a_batch_that_is_cut_the_next_one_is_whole(cut: slice):
    assert [whole for _, whole in batches(log_of(*parts()[cut], *parts()))] == [encode(make())]


def test_an_altered_batch_is_none():
    first, *others = parts()
    altered = msgspec.structs.replace(first, data=first.data[::-1])
    assert batches(log_of(altered, *others)) == []
    assert batches(log_of(*others, first)) == []


def test_elsewhere_such_a_record_is_what_it_says():
    """In a topic of rollouts it is a record that nobody can read, one by one as in earlier runs."""
    log = MemoryLog({"rollouts.x": 1})
    written = [to_message(Output("rollouts.x", "7", part)) for part in parts()]
    log.writer("env").commit(written)
    assert [message.value for message in read(log, "rollouts.x", 0, 0)] == [
        m.value for m in written
    ]
