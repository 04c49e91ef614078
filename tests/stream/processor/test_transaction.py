"""A batch of records is one transaction with its journal entry."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np

from streamrl.stream.log.codec import decode
from streamrl.stream.log.dead_letters import DeadLetter
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.log.reading import read
from streamrl.stream.processor.transaction import decode_and_step, is_in
from streamrl.stream.records import Fate, FateKind, JournalEntry, Slice, Snapshot
from tests.support.adder import Config, State, filled, make_processor, number, run_once


def test_a_turn_is_one_transaction_with_its_journal_entry():
    log = filled(6)
    run_once(log, [4])
    records = [
        decode(dict(m.headers)["schema"], m.value or b"") for m in read(log, "journal.adder", 0, 0)
    ]
    first = records[1]  # the snapshot after four events comes before its entry
    assert isinstance(records[0], Snapshot) and isinstance(first, JournalEntry)
    assert [(s.topic, s.start, s.end, s.count) for s in first.slices] == [
        ("a", 0, 5, 3),
        ("b", 0, 1, 1),
    ]
    assert (first.sequence, first.output_count, first.config, first.snapshot_offset) == (
        0,
        1,
        '{"hold":3}',
        -1,
    )
    second = records[2]
    assert isinstance(second, JournalEntry) and (second.config, second.snapshot_offset) == ("", 0)
    # that is for people to look at, once a second: the entries say it
    assert log.committed_offsets("adder") == {}


def test_what_cannot_be_read_is_put_aside_and_the_part_goes_on():
    log = filled(2)
    log.writer("source").commit(
        [Message("a", b"k", b"\xc1", (("schema", b"env-progress/1"),)), number("a", 5)]
    )
    fold = run_once(log, [10])
    (letter,) = read(log, "dead-letters.a", 0, 0)
    headers = dict(letter.headers)
    assert (
        letter.value == b"\xc1"
        and headers["__connect.errors.offset"] == b"2"
        and b"malformed" in headers["__connect.errors.exception.message"]
    )
    assert fold.state.total == 0 + 1 + 5


def test_dead_letters_and_failures_are_found_among_outputs():
    fates = [
        Fate(
            fate=kind,
            environment="even",
            partition=0,
            offsets=np.arange(1),
            batch=0 if kind == "batched" else None,
            cause="failed",
        )
        for kind in (*get_args(FateKind), "failed")
    ]
    outputs = [Output("fates", "g", fate) for fate in fates]
    processor = replace(
        make_processor(), step=lambda config, state, events, time_s: (state, [*events, *outputs])
    )
    rubbish = Message("a", b"x", b"failed", (("schema", b"env-progress/1"),), offset=7)
    result = decode_and_step(processor, Config(), State(), [rubbish], 0.0)
    assert [fate.fate for fate in result.failed] == ["failed", "failed"]
    assert [(letter.topic, letter.offset) for letter in result.letters] == [("a", 7)]


def test_a_letter_is_of_the_batch_whose_slices_have_its_offset():
    slices = [Slice(topic="a", partition=0, start=3, end=5, count=2)]

    def found(topic: str, partition: int, offset: int) -> bool:
        return is_in(DeadLetter(topic, partition, offset, "", Message("", None, None)), slices)

    assert found("a", 0, 3) and found("a", 0, 4)
    assert not found("a", 0, 2) and not found("a", 0, 5)
    assert not found("a", 1, 3) and not found("b", 0, 3)
