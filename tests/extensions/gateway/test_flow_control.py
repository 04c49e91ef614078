"""How many sessions may be open, worked by hand."""

from __future__ import annotations

from streamrl.extensions.gateway.flow_control import SessionLimit
from streamrl.stream.records import Demand


def wanted(tokens: int) -> Demand:
    return Demand(environment="e", wanted_tokens=tokens, held_tokens=0, closed_groups={})


def test_as_many_sessions_are_open_as_tokens_are_wanted():
    limit = SessionLimit(max_open=100, mean_tokens=10.0)
    assert not limit.refusal(99)  # nobody has said what is wanted
    limit.demand = wanted(30)
    assert [bool(limit.refusal(count)) for count in (0, 2, 3, 4)] == [False, False, True, True]
    limit.demand = wanted(0)
    assert "no more tokens are wanted" in limit.refusal(0)


def test_there_is_a_limit_whatever_is_wanted():
    limit = SessionLimit(max_open=2, mean_tokens=1.0, demand=wanted(1_000))
    assert not limit.refusal(1)
    assert "max_open" in limit.refusal(2)


def test_the_size_of_a_session_is_learned_from_those_that_have_ended():
    limit = SessionLimit(max_open=2, mean_tokens=7.0)
    limit.on_session_end(10)
    assert limit.mean_tokens == 10
    limit.on_session_end(20)
    assert limit.mean_tokens == 15
    for _ in range(1_000):
        limit.on_session_end(40)
    assert abs(limit.mean_tokens - 40) < 0.1


def test_sessions_that_wait_for_rewards_or_their_group_count_as_tokens_and_not_as_open():
    limit = SessionLimit(max_open=2, mean_tokens=10.0, demand=wanted(30))
    assert not limit.refusal(open_sessions=1, outstanding=2)
    assert "3 sessions are open, or wait" in limit.refusal(open_sessions=1, outstanding=3)
    limit.demand = wanted(1_000)
    assert not limit.refusal(open_sessions=1, outstanding=99)
