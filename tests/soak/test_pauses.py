from __future__ import annotations

from tests.soak.pauses import Incident, pauses

KILLED = Incident("broker killed", 10.0, 14.0)


def test_a_gap_is_explained_by_what_was_done_in_it_or_just_before():
    assert pauses([0, 2, 9, 16, 18], [KILLED]) == [(2, 7, ""), (9, 7, "broker killed")]
    # a batch came through; then the part that had lost its broker was missed
    assert pauses([11, 13, 19, 20], [KILLED])[0].cause == "broker killed"


def test_a_pause_that_outlasts_its_cause_by_too_much_is_unexplained():
    assert (
        pauses([9, 29], [KILLED])[0].cause == "broker killed"
        and pauses([9, 29.5], [KILLED])[0].cause == ""
    )


def test_five_seconds_are_no_pause():
    assert pauses([0, 5, 10.25], []) == [(5, 5.25, "")]
