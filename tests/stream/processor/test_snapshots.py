from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np

from streamrl.stream.log.protocol import Event
from streamrl.stream.processor.snapshots import RecordRef, deserialize_state, serialize_state


class Group(msgspec.Struct):
    members: list[Event]
    weight: float = 0.0


class State(msgspec.Struct):
    version: int
    open: dict[str, Group]
    newest: Event | None = None


def event(offset: int) -> Event:
    return Event("rollouts.copy", 0, offset, "g", None)


def test_held_events_are_written_as_where_they_lie_and_read_back():
    state = State(3, {"a": Group([event(5), event(9)], 0.1)}, event(5))
    asked: list[RecordRef] = []

    def fetch(references: Collection[RecordRef]) -> dict[RecordRef, Event]:
        asked.extend(sorted(references))
        return {reference: event(reference[2]) for reference in references}

    again = deserialize_state(serialize_state(state), State, fetch)
    assert asked == [("rollouts.copy", 0, 5), ("rollouts.copy", 0, 9)]
    assert (
        [e.offset for e in again.open["a"].members] == [5, 9]
        and again.newest is not None
        and again.newest.offset == 5
    )
    assert serialize_state(again) == serialize_state(state)


def test_a_reference_is_small():
    state = State(0, {"a": Group([event(100_000 + i) for i in range(1000)])})
    assert len(serialize_state(state)) < 25_000


def test_what_is_no_plain_value_cannot_be_part_of_a_state():
    class Odd(msgspec.Struct):
        value: object

    try:
        serialize_state(Odd(np.zeros(1)))
    except NotImplementedError as error:
        assert "ndarray" in str(error)
    else:
        raise AssertionError("an array went into a state")
