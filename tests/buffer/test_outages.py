"""What an outage of the buffer, or a clock that is set, changes about the groups that close."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.buffer.process import step
from streamrl.buffer.state import BufferState
from streamrl.stream.log.protocol import Event
from tests.support.buffer import CONFIG, groups
from tests.support.build import rollout, rollout_event, version_event

RULES = replace(CONFIG, group_size=4, min_group_size=1)  # and a group waits for 60 s
POLLED = 3  # records of a poll

Arrivals = list[tuple[int, Event]]  # the second in which each rollout is written, ascending


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
    return [
        (at, rollout_event(offset, rollout(group=group, sample=sample)))
        for offset, (at, group, sample) in enumerate(sorted(sent))
    ]


def closed(
    sent: Arrivals, away_at: int = 0, away_s: int = 0, jump_at: int = 0, jump_s: float = 0.0
) -> dict[str, set[str]]:
    """The members of each group, where the buffer is away from second `away_at` on for `away_s`,
    and the clock is set by `jump_s` at second `jump_at`.
    """
    state = BufferState()
    unread = [version_event(0)]
    found = dict[str, set[str]]()
    for second in range(sent[-1][0] + away_s + 70):
        unread += [event for at, event in sent if at == second]
        if away_at <= second < away_at + away_s:
            continue
        time_s = 1e6 + second + (jump_s if second >= jump_at else 0.0)
        while True:
            polled, unread = unread[:POLLED], unread[POLLED:]
            state.clock.is_behind = bool(unread) and second == away_at + away_s
            state, outputs = step(RULES, state, polled, time_s)
            for group in groups(outputs):
                found.setdefault(group.group_id, set(group.uids))
            if not unread:
                break
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
