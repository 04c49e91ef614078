"""What becomes of a rollout that arrives when version 5 is the newest one: max age 1."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.buffer.arrival import Arrival, arrival_of
from streamrl.buffer.state import BufferState, Window
from tests.support.buffer import CONFIG
from tests.support.build import rollout, rollout_event, turns

VERSION = 5


def arrival(window: Window, **fields: Any) -> Arrival:
    """Of a rollout with these fields, otherwise number 0 of group g0 and sampled by version 5."""
    fresh = {"version": VERSION, **fields}
    event = rollout_event(0, rollout(**fresh))
    state = BufferState(version=VERSION, windows={"copy": window})
    return arrival_of(event, rollout(**fresh), "copy", CONFIG, state, window)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Arrival("held")),
        ({"version": 4}, Arrival("held")),
        ({"version": 6}, Arrival("held")),  # it waits for the version
        ({"version": 3}, Arrival("expired")),
        ({"failure": "server gone"}, Arrival("failed", "server gone")),
        ({"failure": "gone \x1b[0m"}, Arrival("failed", "gone \\x1b[0m")),
        ({"misaligned": "token 3"}, Arrival("misaligned", "token 3")),
    ],
)
def test_in_an_open_group(fields: dict[str, Any], expected: Arrival):
    assert arrival(Window(), **fields) == expected


def test_a_rollout_that_a_rule_forbids_is_refused_with_its_cause():
    refused = arrival(Window(), turns=turns(top_p=0.9))
    assert refused.outcome == "refused" and "top_p 0.9" in refused.cause


def test_a_refused_copy_of_a_rollout_is_refused_and_no_duplicate():
    window = Window(seen={"g0-0": VERSION})
    assert arrival(window, turns=turns(top_p=0.9)).outcome == "refused"


def test_a_second_copy_is_a_duplicate_although_its_group_has_closed():
    window = Window(seen={"g0-0": VERSION}, closed={"g0": VERSION})
    assert arrival(window) == Arrival("duplicate")


@pytest.mark.parametrize("fields", [{}, {"version": 3}, {"failure": "server gone"}])
def test_a_rollout_of_a_closed_group_is_late_whatever_else_it_is(fields: dict[str, Any]):
    late = arrival(Window(closed={"g0": VERSION}), **fields)
    assert late == Arrival("late", "late for its group")


def test_a_misaligned_rollout_of_a_closed_group_is_misaligned():
    window = Window(closed={"g0": VERSION})
    assert arrival(window, misaligned="token 3") == Arrival("misaligned", "token 3")
