"""What retention has deleted, of what a processor holds or is still to read."""

from __future__ import annotations

import pytest

from streamrl.stream.log.protocol import Event
from streamrl.stream.processor.definition import ProcessorState
from streamrl.stream.processor.retention import (
    NOTHING_LEFT,
    deleted_inputs,
    first_offsets,
    held_but_deleted,
    is_gone,
    listed,
)
from streamrl.stream.records import JournalEntry, Slice
from tests.support.adder import Config, State, filled, make_processor

PART = make_processor()


@pytest.mark.parametrize(
    ("start", "begin", "gone"),
    [
        (5, 4, False),
        (5, 5, False),
        (5, 6, False),  # offset 5 may be that of a marker
        (5, 7, True),
    ],
)
def test_a_record_is_gone_if_more_than_a_marker_is(start: int, begin: int, gone: bool):
    assert is_gone(start, begin) is gone


def test_of_a_topic_that_does_not_exist_nothing_is_left():
    log = filled(4)
    log.delete_before({("a", 0): 2})
    offsets = first_offsets(log, [("a", 0), ("b", 0), ("rollouts.gone", 3)])
    assert offsets == {("a", 0): 2, ("b", 0): 0, ("rollouts.gone", 3): NOTHING_LEFT}


def entry(*slices: tuple[str, int, int]) -> JournalEntry:
    return JournalEntry(
        sequence=0,
        time_s=0.0,
        slices=[
            Slice(topic=topic, partition=0, start=start, end=end, count=1)
            for topic, start, end in slices
        ],
        digest=b"",
        output_count=0,
    )


def test_what_entries_need_and_retention_has_deleted_is_said_before_they_are_replayed():
    log = filled(8)
    log.delete_before({("a", 0): 4})
    entries = [entry(("b", 0, 2), ("a", 0, 2)), entry(("a", 2, 4))]
    assert deleted_inputs(log, PART, entries) == ["a[0] from offset 0"]
    assert deleted_inputs(log, PART, [entry(("a", 4, 6))]) == []


def test_inputs_after_the_end_of_a_topic_are_of_the_topic_that_had_its_name_before():
    log = filled(4)
    log.add("a", 1)
    assert deleted_inputs(log, PART, [entry(("a", 0, 2), ("b", 0, 2))]) == ["a[0] from offset 0"]


def test_a_state_that_holds_a_deleted_record_could_not_be_restored_again():
    log = filled(8)
    held = [Event(topic, 0, 0, "k", None) for topic in ("a", "b")]
    current = ProcessorState[Config, State](State(held=held))
    assert held_but_deleted(log, PART, current) == []
    log.delete_before({("a", 0): 2})
    (warning,) = held_but_deleted(log, PART, current)
    assert warning.startswith("holds records of a that retention has deleted;")


def test_of_many_names_three_are_listed():
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
