"""A session as a rollout, worked by hand."""

from __future__ import annotations

import pytest

from streamrl.extensions.assembler.rollouts import assemble_rollout, valid_calls
from streamrl.stream.records import ModelCall, Reward, Rollout, SessionEnd
from tests.support.sessions import call, end, reward, start

CALLS = [
    call("a", [1, 2], [3], version=4),
    call("b", [4], [5, 6], "a", version=5),
    call("c", [7], [8], "a", version=5),
]


def rollout(
    calls: list[ModelCall],
    rewards: list[Reward],
    ended: SessionEnd = end("s"),  # noqa: B008  # a record cannot change
    weights: dict[str, float] | None = None,
) -> Rollout:
    return assemble_rollout(start("s"), "g", calls, rewards, ended, weights or {})


def tokens(rollout: Rollout) -> list[tuple[list[int], bool, bool]]:
    """Of each turn: its tokens, whether they were sampled, whether a sequence begins there."""
    return [
        ([] if turn.tokens is None else turn.tokens.tolist(), turn.logprobs is not None, turn.fork)
        for turn in rollout.turns
    ]


def test_a_branch_begins_with_the_tokens_before_it_and_samples_none_of_them_again():
    made = rollout(CALLS, [reward("s", 0.5)])
    assert tokens(made) == [
        ([1, 2], False, False),
        ([3], True, False),
        ([4], False, False),
        ([5, 6], True, False),
        ([7], False, True),
        ([8], True, False),
    ]
    assert (made.turns[4].fork_of, made.turns[4].fork_at) == (0, 3)
    assert (made.rollout_uid, made.group_id, made.reward) == ("s", "g", 0.5)
    assert (made.policy_version, made.newest_policy_version) == (4, 5)
    assert not made.truncated


def test_rewards_are_weighted_and_those_of_a_call_belong_to_its_turn():
    given_rewards = [
        reward("s", 1.0, "answer"),
        reward("s", 0.5, "call", call="c"),
        reward("s", 0.25, "answer"),  # the last one counts
    ]
    made = rollout(CALLS, given_rewards, weights={"answer": 2.0})
    assert made.rewards == {"answer": 0.25, "call": 0.5}
    assert made.reward == 1.0
    assert [turn.reward for turn in made.turns if turn.logprobs is not None] == [None, None, 0.5]


@pytest.mark.parametrize(
    ("calls", "rewards", "ended", "why"),
    [
        ([], [reward("s")], end("s"), "ended before the policy was asked"),
        (CALLS, [reward("s")], end("s", failure="the sandbox is gone"), "the sandbox is gone"),
        (CALLS, [reward("s", failure="HTTP 500")], end("s"), "reward 'reward': HTTP 500"),
        (CALLS, [reward("s", call="x")], end("s"), "is of call 'x', which is not there"),
    ],
)
def test_what_cannot_be_trained_on_is_a_failed_rollout(
    calls: list[ModelCall], rewards: list[Reward], ended: SessionEnd, why: str
):
    made = rollout(calls, rewards, ended)
    assert why in made.failure
    assert not made.turns
    assert made.policy_version == (4 if calls else 0)


def test_a_version_that_no_rollout_can_have_fails_it():
    made = rollout([call("a", [1], [2], version=2**31)], [reward("s")])
    assert "are not a span" in made.failure
    assert made.policy_version == 2**31 - 1


def test_a_session_that_the_assembler_has_ended_is_truncated():
    made = rollout(CALLS, [reward("s")], end("s", truncation="time", is_last=True))
    assert made.truncated
    assert made.metadata == {"truncation": "time"}


def test_forks_are_counted_by_their_cause():
    again = call("d", [1, 9], [9], "b", fork="template")
    made = rollout([*CALLS, again], [reward("s")])
    assert made.metadata == {"forks": {"template": 1}}
    assert tokens(made)[-2:] == [([1, 9], False, True), ([9], True, False)]


def test_calls_of_different_temperatures_are_not_trained_on():
    made = rollout([CALLS[0], call("b", [4], [5], "a", temperature=0.5)], [reward("s")])
    assert "temperatures [0.5, 1.0]" in made.misaligned


def test_a_request_counts_once_and_so_does_what_goes_on_from_nothing():
    calls = [
        call("a", [1], [2], request="r"),
        call("b", [1], [3], request="r"),
        call("c", [4], [5], "b"),
        call("d", [4], [5], "a"),
    ]
    assert [each.call for each in valid_calls(calls)] == ["a", "d"]


def test_a_call_that_is_left_out_is_not_in_the_rollout():
    title = call("t", [9], [9], trained=False)
    made = rollout([*CALLS, title], [reward("s", 0.5), reward("s", 0.25, "title", call="t")])
    assert tokens(made) == tokens(rollout(CALLS, []))
    assert made.metadata == {"not_trained": 1}
    assert made.reward == 0.75  # what it earned is the rollout's


def test_a_call_that_is_left_out_and_continued_is_context():
    calls = [call("a", [1], [2]), call("b", [3], [4], "a", trained=False), call("c", [5], [6], "b")]
    made = rollout(calls, [reward("s", 0.5), reward("s", 1.0, "call", call="c")])
    assert tokens(made) == [
        ([1], False, False),
        ([2], True, False),
        ([3], False, False),
        ([4], False, False),
        ([5], False, False),
        ([6], True, False),
    ]
    assert [turn.reward for turn in made.turns if turn.logprobs is not None] == [None, 1.0]


def test_an_answer_that_was_lost_is_trained_on_only_if_a_call_continues_it():
    calls = [call("a", [1], [2], lost=True), call("b", [1], [3])]
    assert [turn.message for turn in rollout(calls, [reward("s")]).turns] == [
        "asked in b",
        "said in b",
    ]
    continued = [*calls, call("c", [4], [5], "a")]
    made = rollout(continued, [reward("s")])
    assert [turn.message for turn in made.turns if turn.logprobs is not None] == [
        "said in a",
        "said in c",
        "said in b",
    ]


def test_an_answer_that_was_lost_counts_once_it_is_recorded_as_received():
    lost = call("a", [1], [2], lost=True)
    received = call("a", [1], [2])
    assert not rollout(valid_calls([lost, received]), [reward("s")]).failure


def test_a_session_in_which_nothing_is_trained_on_has_failed():
    made = rollout([call("a", [1], [2], lost=True)], [reward("s")])
    assert made.failure == "none of its answers is trained on: they were lost, or are left out"
