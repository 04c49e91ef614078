"""The clock of a part counts the time in which the part was there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.stream.processor.awake_clock import MAX_STEP_S, AwakeClock


def after(*times: float) -> AwakeClock:
    """A clock that was advanced at these times."""
    clock = AwakeClock()
    for time_s in times:
        clock.advance(time_s)
    return clock


@pytest.mark.parametrize(
    ("times", "awake_s"),
    [
        ((1000.0,), 0.0),  # nothing is known of the time before the first step
        ((1000.0, 1000.5, 1001.5), 1.5),
        ((1000.0, 1061.0, 1061.5), 2.5),  # away for 61 s
        ((1000.0, 4600.0, 4601.0), 3.0),  # the machine's clock was set forward by an hour
        ((1000.0, 1001.0, 10.0, 11.0), 2.0),  # and back
        ((0.0, 1.0), 1.0),
    ],
)
def test_each_step_adds_the_time_since_the_last_and_two_seconds_at_most(
    times: tuple[float, ...], awake_s: float
):
    assert after(*times).awake_s == awake_s


def test_while_the_backlog_is_unread_the_clock_stands_still_and_no_limit_is_reached():
    clock = after(1000.0, 1001.0)
    assert clock.has_waited(0.0, 1.0) and not clock.has_waited(0.0, 1.1)
    clock.is_behind = True
    clock.advance(1002.0)
    assert clock.awake_s == 1.0 and not clock.has_waited(0.0, 1.0)
    clock.is_behind = False
    clock.advance(1003.0)
    assert clock.awake_s == 2.0 and clock.has_waited(1.0, 1.0)


def test_a_step_is_due_a_second_after_the_last_and_when_the_machine_s_clock_was_set_back():
    clock = after(1000.0)
    assert not clock.is_due(1000.9)
    assert clock.is_due(1001.0)
    assert not clock.is_due(999.5)
    assert clock.is_due(999.0)
    assert AwakeClock().is_due(1000.0)


@given(
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=30),
    st.integers(0, 29),
    st.one_of(st.floats(-1e5, -10.0), st.floats(10.0, 1e5)),
)
def test_an_outage_or_a_clock_step_moves_a_limit_by_less_than_a_step(
    gaps: list[float], where: int, jump_s: float
):
    """The same steps with a jump of the time before one of them: each limit is reached at the same
    step, or at most MAX_STEP_S of clock time apart.
    """
    plain = AwakeClock()
    jumped = AwakeClock()
    time_s = 1e6
    for number, gap_s in enumerate([0.0, *gaps]):
        time_s += gap_s
        plain.advance(time_s)
        jumped.advance(time_s + (jump_s if number > where else 0.0))
        assert abs(jumped.awake_s - plain.awake_s) <= MAX_STEP_S + 1e-6
