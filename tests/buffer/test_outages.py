"""What an outage of the buffer, or a clock that is set, changes about the groups that close."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.buffer.process import step
from streamrl.buffer.state import BufferState
from tests.support.buffer import CONFIG, groups
from tests.support.build import rollout, rollout_event, version_event
from tests.support.outages import Arrivals, polls

RULES = replace(CONFIG, group_size=4, min_group_size=1)  # and a group waits for 60 s


@st.composite
def arrivals(draw: st.DrawFn) -> Arrivals:
    """Rollouts of a few groups. Those of a group come within its wait, or clearly later."""
    gap = st.one_of(st.integers(0, 50), st.integers(70, 100))
    sent = list[tuple[int, str, int]]()
    for number in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, 100))
        for sample in range(draw(st.integers(1, 4))):
            sent.append((at, f"g{number}", sample))
            at += draw(gap)
    rollouts = [
        (at, rollout_event(offset, rollout(group=group, sample=sample)))
        for offset, (at, group, sample) in enumerate(sorted(sent))
    ]
    return [(0, version_event(0)), *rollouts]


def closed(sent: Arrivals, away_s: int = 0, **disturbed: Any) -> dict[str, set[str]]:
    """The members of each group, where the buffer is disturbed as in `polls`."""
    state = BufferState()
    found = dict[str, set[str]]()
    for poll in polls(sent, sent[-1][0] + away_s + 70, away_s=away_s, **disturbed):
        state.clock.is_behind = poll.is_behind
        state, outputs = step(RULES, state, poll.events, poll.time_s)
        for group in groups(outputs):
            found.setdefault(group.group_id, set(group.uids))
    return found


@settings(deadline=None)
@given(arrivals(), st.integers(0, 200), st.floats(-1e5, 1e5))
def test_a_clock_that_is_set_changes_no_group(sent: Arrivals, jump_at: int, jump_s: float):
    assert closed(sent, jump_at=jump_at, jump_s=jump_s) == closed(sent)


@settings(deadline=None)
@given(arrivals(), st.integers(1, 200), st.integers(1, 400))
def test_an_outage_of_all_parts_changes_no_group(sent: Arrivals, away_at: int, away_s: int):
    later = [(at + away_s if at >= away_at else at, event) for at, event in sent]
    assert closed(later, away_at=away_at, away_s=away_s) == closed(sent)


@settings(deadline=None)
@given(arrivals(), st.integers(1, 200), st.integers(1, 400))
def test_an_outage_of_the_buffer_takes_no_member_from_a_group(
    sent: Arrivals, away_at: int, away_s: int
):
    """Some groups have more members: what would have come late is there when the buffer is back."""
    undisturbed = closed(sent)
    disturbed = closed(sent, away_at=away_at, away_s=away_s)
    assert disturbed.keys() == undisturbed.keys()
    for group_id, members in undisturbed.items():
        assert disturbed[group_id] >= members
