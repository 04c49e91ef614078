"""Rewards on the way, worked by hand: what falls at a token counts for those before it and not for
those behind.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from streamrl.buffer.advantages import rloo
from streamrl.buffer.groups import score_group, trained_sequences
from streamrl.buffer.returns import per_token_rewards, reward_to_go, token_advantages
from streamrl.stream.records import Rollout, Turn
from streamrl.stream.records.sequences import sampled_indices
from tests.support.build import floats, rollout, rollout_event, tokens
from tests.support.groups import joined_group


def said(*ids: int, reward: float | None = None, token_rewards: np.ndarray | None = None) -> Turn:
    return Turn(
        message="",
        role="assistant",
        tokens=tokens(*ids),
        logprobs=floats(*[-0.5] * len(ids)),
        reward=reward,
        token_rewards=token_rewards,
    )


def asked(*ids: int, fork: bool = False, reward: float | None = None) -> Turn:
    return Turn(message="", role="user", tokens=tokens(*ids), fork=fork, reward=reward)


def of(sample: int, total: float, *turns: Turn) -> Rollout:
    return rollout(sample=sample, reward=total, turns=[*turns])


def test_a_turns_reward_falls_at_its_last_token_and_a_tokens_at_itself():
    turns = [
        asked(1, 2),
        said(3, 4, reward=0.5),
        asked(9, reward=0.25),
        said(5, 6, token_rewards=floats(0.125, -0.125)),
    ]
    assert per_token_rewards(turns).tolist() == [0, 0, 0, 0.5, 0.25, 0.125, -0.125]
    # sampled: 3, 4, 5, 6. In all 2, of which 0.75 on the way: the rest, 1.25, is for everybody
    assert reward_to_go(of(0, 2.0, *turns)).tolist() == [2.0, 2.0, 1.25, 1.125, 1.25]


def test_advantages_are_the_groups_function_at_every_position():
    # to go: 1.5 1.5 1
    one = of(0, 1.5, asked(1), said(3, 4, reward=0.5), asked(9), said(5, reward=1.0))
    # to go: 0.5 0.25 0.25 0.25
    two = of(1, 0.5, asked(1), said(3, reward=0.25), asked(9), said(6, 7, 8, reward=0.25))
    advantages = token_advantages([one, two], rloo)
    # with two, leave-one-out is the difference; when the first is over it stands with 0
    assert advantages is not None
    assert [a.tolist() for a in advantages] == [[1.0, 1.25, 0.75], [-1.0, -1.25, -0.75, 0.25]]
    assert [a[0] for a in advantages] == rloo(floats(1.5, 0.5)).tolist()


def test_where_nothing_is_earned_on_the_way_there_is_one_advantage_a_rollout():
    plain = [of(i, float(i), asked(1), said(3, 4, reward=float(i))) for i in range(2)]
    late = [of(i, float(i), asked(1), said(3, 4, token_rewards=floats(0, i))) for i in range(2)]
    for rollouts in (plain, late, [of(0, 1.0, asked(1), said(3)), of(1, 0.0, asked(1), said(3))]):
        assert token_advantages(rollouts, rloo) is None
    assert (
        score_group([rollout_event(i, r) for i, r in enumerate(plain)], rloo).token_advantages
        is None
    )


def test_the_function_is_asked_once_where_nothing_changes():
    asked_for: list[list[float]] = []

    def spy(rewards: np.ndarray) -> np.ndarray:
        asked_for.append(rewards.tolist())
        return rewards

    token_advantages([of(0, 1.0, said(*range(50), reward=0.5), said(*range(50), reward=0.5))], spy)
    assert asked_for == [[1.0], [0.5], [0.0]]


def test_rewards_that_float32_does_not_hold_apart_are_summed_in_float64():
    rewards = np.full(3, np.float32(0.1))
    assert (
        reward_to_go(
            of(0, float(rewards.sum(dtype=np.float64)), said(3, 4, 5, token_rewards=rewards))
        )[-1]
        == 0.0
    )


def test_nonsense_of_an_advantage_function_is_named_with_its_group():
    turns = (said(3, reward=0.5), said(4, reward=0.5))
    with pytest.raises(
        ValueError, match=r"group g0: the advantage function returned .* expected 1 finite"
    ):
        score_group(
            [rollout_event(0, of(0, 1.0, *turns))], lambda r: np.full(1, np.nan) if r[0] < 1 else r
        )


def forked() -> Rollout:
    """Two answers, and then a third to a history that the template has rewritten."""
    return of(
        0,
        1.0,
        asked(1, 2),
        said(3, 4, reward=0.25),
        asked(9),
        said(5),
        asked(1, 2, 4, 9, fork=True),
        said(7, 8, reward=0.75),
    )


def test_a_fork_is_another_sequence_with_the_rewritten_history_masked():
    record = joined_group(
        [rollout_event(4, forked()), rollout_event(6, of(1, 0.0, asked(1, 2), said(7)))]
    )
    assert [len(turns) for turns in trained_sequences(forked()).values()] == [4, 2]
    assert (record.uids, record.offsets.tolist(), record.rewards.tolist()) == (
        ["g0-0", "g0-0", "g0-1"],
        [4, 4, 6],
        [1, 1, 0],
    )
    assert record.prompt.tolist() == [1, 2] and record.lengths.tolist() == [4, 4, 1]
    assert record.tokens.tolist() == [3, 4, 9, 5, 4, 9, 7, 8, 7]
    assert sampled_indices(record).tolist() == [0, 1, 3, 6, 7, 8]
    # to go: 1 1 .75 .75 .75 against 0 0 0 0 0: what was earned before the fork is not the merit of
    # what comes behind
    assert record.advantages.tolist() == [1, 1, -1]
    assert record.token_advantages is not None and record.token_advantages.tolist() == [
        1,
        1,
        0.75,
        0.75,
        0.75,
        -1,
    ]


def test_a_fork_in_which_nothing_was_sampled_is_left_out():
    cut = of(0, 1.0, asked(1), said(3), asked(1, 2, fork=True))
    assert [len(turns) for turns in trained_sequences(cut).values()] == [2]


def at(time_s: float, turn: Turn) -> Turn:
    return structs.replace(turn, timestamp=time_s)


def with_sub_agent(sample: int, main: float | None, sub: float | None) -> Rollout:
    """The main agent answers at 1 and at 5, and a sub-agent at 3. In the rollout the sequence of
    the sub-agent is the last.
    """
    return of(
        sample,
        (main or 0.0) + (sub or 0.0),
        at(0.5, asked(1)),
        at(1.0, said(2)),
        at(4.0, asked(3)),
        at(5.0, said(4, reward=main)),
        at(2.0, asked(7, fork=True)),
        at(3.0, said(8, 9, reward=sub)),
    )


def test_what_is_earned_after_a_sub_agent_is_its_merit_too():
    # sampled: 2 at 1 s, 4 at 5 s, 8 and 9 at 3 s
    assert reward_to_go(with_sub_agent(0, 1.0, None)).tolist() == [1, 1, 1, 1, 0]
    advantages = token_advantages(
        [with_sub_agent(0, 1.0, None), with_sub_agent(1, 0.0, None)], rloo
    )
    assert advantages is None  # every token could still earn all


def test_what_a_sub_agent_earned_is_no_merit_of_what_came_after_it():
    assert reward_to_go(with_sub_agent(0, None, 1.0)).tolist() == [1, 0, 1, 1, 0]
    advantages = token_advantages(
        [with_sub_agent(0, None, 1.0), with_sub_agent(1, None, None)], rloo
    )
    assert advantages is not None
    assert [each.tolist() for each in advantages] == [[1, 0, 1, 1], [-1, 0, -1, -1]]


def test_the_baseline_compares_tokens_of_the_same_time():
    """In time the first rollout is 2, 8, 9, 4, and all of them are worth 1, 1, 1, 0.5."""
    one = with_sub_agent(0, 0.5, 0.5)
    assert reward_to_go(one).tolist() == [1, 0.5, 1, 1, 0]
    two = of(1, 0.0, asked(1), said(5, 6, 7, 8, reward=0.0))
    advantages = token_advantages([one, two], rloo)
    assert advantages is not None
    assert [each.tolist() for each in advantages] == [[1, 0.5, 1, 1], [-1, -1, -1, -0.5]]


def test_answers_that_were_sampled_at_once_owe_each_other_nothing():
    turns = [
        at(1.0, asked(1)),
        at(5.0, said(2, reward=0.25)),
        at(2.0, asked(1, fork=True)),
        at(4.0, said(3, reward=0.5)),
    ]
    assert reward_to_go(of(0, 0.75, *turns)).tolist() == [0.25, 0.5, 0]


def test_a_sequence_follows_itself_even_where_its_clock_was_set_back():
    turns = [
        at(10.0, asked(1)),
        at(11.0, said(2)),
        at(3.0, asked(3)),
        at(4.0, said(4, reward=1.0)),
        at(20.0, asked(1, fork=True)),
        at(21.0, said(5, reward=0.5)),
    ]
    assert reward_to_go(of(0, 1.5, *turns)).tolist() == [1.5, 1.5, 0.5, 0]


def test_without_timestamps_the_order_of_the_turns_is_the_time():
    turns = [asked(1), said(2), asked(1, fork=True), said(3, reward=1.0)]
    assert reward_to_go(of(0, 1.0, *turns)).tolist() == [1, 1, 0]
