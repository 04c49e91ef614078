"""Why learner and servers wait, worked by hand."""

from __future__ import annotations

import pytest

from streamrl.run.monitoring.time_causes import (
    BatchWait,
    Interval,
    ServerTime,
    overlap,
    remainder,
    unasked,
    waiting,
)


def test_what_is_covered_twice_counts_once():
    one = Interval(10, 20)
    parts = overlap(
        one,
        [Interval(13, 16), Interval(8, 11), Interval(12, 14), Interval(19, 25), Interval(30, 31)],
    )
    assert parts == [(10, 11), (12, 14), (14, 16), (19, 20)]
    assert remainder(one, parts) == [(11, 12), (16, 19)]
    assert overlap(one, []) == [] and remainder(one, []) == [one]


def test_a_batch_waits_for_all_shares_then_for_one():
    assert BatchWait(built=50.0, data_s=4.0, share_s=3.0).intervals == {
        "share": (47.0, 50.0),
        "data": (43.0, 47.0),
    }


def test_every_second_that_the_learner_waits_has_one_cause():
    # idle from 100 to 110; the version was announced at 100.5, the batch was due at 101, had one
    # share by 105, was built at 109; the server swapped from 99 to 102 and from 104 to 106
    found = waiting(
        Interval(100, 110),
        BatchWait(109.0, data_s=4.0, share_s=4.0),
        [Interval(104, 106), Interval(99, 102)],
        100.5,
    )
    assert found == {
        "version": 0.5,
        "weights": 1.5 + 2,
        "share": 109 - 106,
        "data": 104 - 102,
        "log": 1,
    }
    assert sum(found.values()) == 10


def test_a_batch_that_was_there_before_leaves_the_way_only():
    assert waiting(Interval(100, 100.5), BatchWait(90.0, 5.0, 1.0), [], 99.0) == {
        "version": 0,
        "weights": 0,
        "share": 0,
        "data": 0,
        "log": 0.5,
    }


def test_a_server_that_nobody_asks():
    # idle for 0.3 of 1 s; a batch waited for one share during 0.2 of it: so much goes to the share
    before = ServerTime(10.0, 5.0, 1.0, 4.0)
    after = ServerTime(11.0, 5.6, 1.1, 4.3)
    assert unasked(before, after, [Interval(9.5, 10.2)]) == pytest.approx(
        {"share": 0.2, "demand": 0.1}
    )
    assert unasked(before, after, [Interval(10.0, 11.0)]) == pytest.approx(
        {"share": 0.3, "demand": 0.0}
    )
    assert unasked(before, after, []) == pytest.approx({"share": 0.0, "demand": 0.3})
