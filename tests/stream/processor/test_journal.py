"""Which records a processor took, and how they are read again."""

from __future__ import annotations

import pytest
from msgspec import structs

from streamrl.stream.log import chunks
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.processor.journal import (
    SKIP_RECORDS,
    SliceReader,
    last_record,
    record_slices,
    split_at_gaps,
)
from streamrl.stream.records import JournalEntry, Slice, Snapshot
from streamrl.system.errors import InputGone
from tests.support.adder import TOPICS, filled


def test_in_a_journal_that_begins_within_a_large_snapshot_the_last_entry_is_found(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(chunks, "MESSAGE_BYTES", 500)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    log = MemoryLog(TOPICS)
    large = Snapshot(sequence=3, positions=[], state=bytes(2_000), config="{}")
    entry = JournalEntry(sequence=4, time_s=1.0, slices=[], digest=b"", output_count=0)
    log.writer("adder").commit(
        [to_message(Output("journal.adder", "adder", record)) for record in (large, entry)]
    )
    log.delete_before({("journal.adder", 0): 2})
    assert last_record(log, "journal.adder", JournalEntry) == entry


def test_long_gaps_are_not_read():
    far = SKIP_RECORDS + 1
    assert [list(s) for s in split_at_gaps([1, 2, far + 2, far + 3, 3 * far])] == [
        [
            1,
            2,
        ],
        [far + 2, far + 3],
        [3 * far],
    ]
    assert [list(s) for s in split_at_gaps([5])] == [[5]]
    assert [list(s) for s in split_at_gaps([0, SKIP_RECORDS])] == [[0, SKIP_RECORDS]]


def message(topic: str, offset: int) -> Message:
    return Message(topic, b"k", b"", (), 0, offset)


def test_what_is_taken_is_noted_run_by_run_and_counted():
    """Offset 6 is a transaction's marker: the slice ends behind the last record."""
    offsets = {("a", 0): 4}
    slices = list[Slice]()
    taken = [message("a", 4), message("a", 5), message("b", 0), message("a", 7)]
    assert list(record_slices(taken, offsets, slices)) == taken
    assert [(piece.topic, piece.start, piece.end, piece.count) for piece in slices] == [
        ("a", 4, 6, 2),
        ("b", 0, 1, 1),
        ("a", 6, 8, 1),
    ]
    assert offsets == {("a", 0): 8, ("b", 0): 1}


def test_a_slice_is_read_again_and_one_of_which_a_record_is_gone_is_not():
    log = filled(8)  # a: 0, 2 and so on
    reader = SliceReader(log, lambda topic: ("env-progress",))
    piece = Slice(topic="a", partition=0, start=0, end=3, count=2)
    assert [message.offset for message in reader.read_slice(piece)] == [0, 2]
    assert reader.records_read == 2
    reader.close()
    with pytest.raises(
        InputGone, match=r"^a\[0\] 0 to 3 held 3 records, now 2: retention or a user"
    ):
        reader.read_slice(structs.replace(piece, count=3))


def test_single_records_are_read_wherever_they_lie_and_a_deleted_one_is_empty():
    log = filled(8)
    log.delete_before({("a", 0): 2})
    reader = SliceReader(log, lambda topic: ("env-progress",))
    events = reader.read_records([("a", 0, 0), ("a", 0, 4), ("b", 0, 2)])
    values = {where: getattr(event.record, "next_problem", None) for where, event in events.items()}
    assert values == {("a", 0, 0): None, ("a", 0, 4): 4, ("b", 0, 2): 3}
    with pytest.raises(InputGone, match="1 records that a snapshot refers to are gone, the first"):
        reader.read_records([("a", 0, 5)])  # that of a marker
