"""The fold of sessions, worked by hand, and the same for every replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.envs.sessions.keys import SessionName
from streamrl.extensions.gateway.session_index import LiveSession, SessionIndex, reward_hash
from streamrl.stream.records import (
    InferenceMetadata,
    ModelCall,
    Record,
    Reward,
    SessionEnd,
    SessionStart,
)

START = SessionStart(session="s", environment="e", problem_id="p")
END = SessionEnd(session="s")


def call(
    name: str,
    continues: str = "",
    request: str = "",
    choice: int = 0,
    began_s: float = 0.0,
    ended_s: float = 0.0,
) -> ModelCall:
    return ModelCall(
        session="s",
        call=name,
        continues=continues,
        request=request or f"{name}#0",
        choice=choice,
        messages=[{"role": "user", "content": name}],
        prompt=np.array([1], np.uint16),
        tokens=np.array([2], np.uint16),
        logprobs=np.zeros(1, np.float32),
        text=name,
        inference_metadata=InferenceMetadata(
            server="i", temperature=1.0, latency_s=ended_s - began_s
        ),
        time_s=ended_s,
    )


WANTED: dict[str, tuple[str, ...]] = {"e": ()}


def folded(*records: Record) -> SessionIndex:
    index = SessionIndex(WANTED, max_closed=2)
    for record in records:
        index.apply("e", record)
    return index


def session(index: SessionIndex) -> LiveSession:
    return index.sessions[SessionName("e", "s")]


def test_a_request_counts_once_however_often_it_is_written():
    index = folded(
        START,
        call("a"),
        call("a"),  # a producer that sent it twice
        call("b", request="a#0"),  # a replica that sampled it too
        call("c", "b"),  # goes on from an answer that does not count
        call("d", request="x#1"),
        call("e", request="y#0", choice=1),
        call("f", request="y#0", choice=0),
    )
    found = session(index)
    assert list(found.tree.calls) == ["a", "d", "e", "f"]
    assert found.answer_counts == {"a#0": 1, "x#1": 1, "y#0": 2}
    assert [found.next_ordinal(body) for body in "axyz"] == [1, 2, 1, 0]


def test_an_agent_that_starts_again_counts_from_the_first_request():
    found = session(folded(START, call("a"), call("b", request="a#1"), START))
    assert found.next_ordinal("a") == 0 and found.answer_counts == {"a#0": 1, "a#1": 1}
    assert found.starts == 2 and list(found.tree.calls) == ["a", "b"]
    again = session(folded(START, call("a"), START, call("b", request="a#1")))
    assert again.next_ordinal("a") == 2


def test_a_call_in_flight_when_the_agent_was_killed_is_asked_for_again():
    again = SessionStart(session="s", environment="e", problem_id="p", time_s=5.0)
    late = call("a", began_s=4.0, ended_s=7.0)
    found = session(folded(START, again, late, call("b", began_s=5.0, ended_s=6.0)))
    assert found.answer_counts == {"a#0": 1, "b#0": 1}
    assert (found.next_ordinal("a"), found.next_ordinal("b")) == (0, 1)


def test_of_a_session_that_has_ended_only_that_is_kept():
    index = folded(START, call("a"), END, call("b"), START)
    assert (
        not index.sessions
        and index.has_ended(SessionName("e", "s"))
        and not index.has_ended(SessionName("f", "s"))
    )
    assert not index.closed and index.count_waiting("e") == 1


def test_a_few_sessions_whose_rollout_was_made_are_remembered():
    index = folded()
    for name in ("s", "t", "u"):
        index.apply("e", SessionStart(session=name, environment="e", problem_id="p"))
        index.apply("e", SessionEnd(session=name, failure="gone"))
    assert not index.waiting
    assert not index.has_ended(SessionName("e", "s")) and index.has_ended(SessionName("e", "t"))


def paid(value: float, call: str = "", name: str = "reward") -> Reward:
    return Reward(rollout="s", name=name, value=value, call=call)


def test_rewards_count_until_the_rollout_is_made():
    index = folded(START, call("a"), call("b", "a"), paid(1.0, "a"), END)
    assert SessionName("e", "s") in index.closed  # one came before the end
    index = folded(START, call("a"), call("b", "a"), END, paid(1.0, "a"))
    rewards = index.rewards_of(SessionName("e", "s"))
    assert rewards is not None and rewards.counted == {paid(1.0, "a")}
    index.apply("e", paid(2.0, "b"))
    assert rewards.is_complete and rewards.counted == {paid(1.0, "a"), paid(2.0, "b")}
    assert index.rewards_of(SessionName("e", "s")) is None
    index.apply("e", paid(3.0, "b"))
    closed = index.closed[SessionName("e", "s")]
    assert reward_hash(paid(2.0, "b")) in closed and reward_hash(paid(3.0, "b")) not in closed


def test_rewards_of_closed_sessions_are_bounded_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.extensions.gateway.session_index.MAX_REMEMBERED_OF_ALL", 3)
    index = SessionIndex(WANTED)
    for name in ("s", "t", "u"):
        index.apply("e", SessionStart(session=name, environment="e", problem_id="p"))
        for value in (1.0, 2.0):
            index.apply("e", Reward(rollout=name, name=f"r{value}", value=value))
        index.apply("e", SessionEnd(session=name, failure="gone", is_last=True))
    assert {name.session: len(rewards) for name, rewards in index.closed.items()} == {"u": 2}


def test_requests_that_fail_leave_nothing():
    live = session(folded(START))
    for number in range(3):
        live.reserve_ordinal(f"body-{number}", 0)
        live.reserve_ordinal("same", number)
    for number in range(3):
        live.release_ordinal(f"body-{number}", 0)
        assert live.next_ordinal(f"body-{number}") == 0
    live.release_ordinal("same", 2)
    assert live._next_reserved == {"same": 2} and live.next_ordinal("same") == 2


def test_the_last_end_of_the_assembler_closes_a_session():
    index = folded(START, call("a"), END, SessionEnd(session="s", is_last=True))
    assert not index.waiting and index.closed == {SessionName("e", "s"): frozenset()}


def test_calls_of_a_session_whose_beginning_is_gone_are_left_out():
    assert not folded(call("a")).sessions


def test_whoever_counts_sizes_is_told_of_each_session_that_ends():
    ended = list[str]()
    index = SessionIndex(WANTED, lambda session: ended.append(session.start.session))
    for record in (START, call("a"), END, END):
        index.apply("e", record)
    assert ended == ["s"]


@st.composite
def written(draw: st.DrawFn) -> list[ModelCall]:
    """What replicas write: calls that go on from one that was written before, requests twice."""
    found = list[ModelCall]()
    for number in range(draw(st.integers(1, 12))):
        continues = draw(st.sampled_from(["", *(made.call for made in found)]))
        request = draw(st.sampled_from(["", *(made.request for made in found)]))
        found.append(call(f"c{number}", continues, request))
    return found


@given(written(), st.data())
def test_every_replica_has_the_same_tree(calls: Sequence[ModelCall], data: st.DataObject):
    """Whatever it had read when it began, and whichever record came twice."""
    log: list[Record] = [START, *calls]
    twice = [record for record in log[1:] for _ in range(data.draw(st.integers(1, 2)))]
    one = session(folded(*log))
    other = session(folded(START, *twice))
    assert (
        list(one.tree.calls) == list(other.tree.calls) and one.answer_counts == other.answer_counts
    )
    for made in one.tree.calls.values():
        assert not made.continues or made.continues in one.tree.calls
        asked = one.tree.conversation(made.call)
        assert other.tree.find_continuation(
            [*asked, {"role": "user", "content": "?"}]
        ) == one.tree.find_continuation([*asked, {"role": "user", "content": "?"}])


def test_a_number_that_is_too_long_to_be_one_counts_nothing():
    index = folded(START, call("a", request="x#" + "9" * 5_000))
    assert session(index).next_ordinal("x") == 0


def counted(index: SessionIndex, *records: Record) -> list[int]:
    """The outstanding sessions after each of these records."""
    counts = list[int]()
    for record in records:
        index.apply("e", record)
        counts.append(index.count_outstanding("e"))
    return counts


def begun(name: str, problem: str = "p") -> SessionStart:
    return SessionStart(session=name, environment="e", problem_id=problem)


def ended(name: str) -> SessionEnd:
    return SessionEnd(session=name)


def rewarded(name: str) -> Reward:
    return Reward(rollout=name, name="reward", value=1.0)


def test_a_session_counts_until_no_other_of_its_group_is_open_or_without_reward():
    index = SessionIndex(WANTED, group_sizes={"e": 8})
    assert counted(index, begun("a"), begun("b"), begun("other", "q")) == [1, 2, 3]
    assert counted(index, ended("a"), rewarded("a")) == [3, 3]  # `b` is open
    assert counted(index, ended("b"), rewarded("b")) == [3, 1]
    assert counted(index, rewarded("other"), ended("other")) == [1, 0]


def test_a_session_counts_until_its_group_is_complete():
    index = SessionIndex(WANTED, group_sizes={"e": 2})
    assert counted(index, *map(begun, "abc")) == [1, 2, 3]
    assert counted(index, ended("a"), rewarded("a")) == [3, 3]
    assert counted(index, ended("b"), rewarded("b")) == [3, 1]
    assert counted(index, begun("a"), begun("c")) == [1, 1], "neither begins again"
