"""Named rewards at three levels to one scalar, by hand."""

from __future__ import annotations

import pytest

from streamrl.envs.sessions.rewards import (
    RewardBreakdown,
    apply_weights,
    merge,
    normalize,
    totals,
    with_rewards,
)
from tests.support.build import turns

MIXED = RewardBreakdown(
    {"answer": 1.0},
    [{"call": 0.5}, {"call": 0.25, "style": 1}],
    [{"brief": [0.0, -1.0]}, {"brief": [-1.0]}],
)


def test_a_breakdown_is_returned_as_it_is():
    assert normalize(MIXED) is MIXED


def test_the_only_turn_of_the_policy_has_earned_all_that_the_rollout_has():
    made = apply_weights(RewardBreakdown({"answer": 1.0}), {}, [4])
    asked, answered = with_rewards(turns(), made)
    assert (asked.reward, answered.reward, answered.rewards) == (None, 1.0, {"answer": 1.0})


def test_of_several_turns_each_has_what_it_earned():
    made = apply_weights(MIXED, {}, [2, 1])
    both = [*turns(response=[3, 4]), *turns(response=[5])]
    first, second = with_rewards(both, made)[1::2]
    assert (first.rewards, second.rewards) == ({"call": 0.5}, {"call": 0.25, "style": 1.0})


def test_totals_add_up_over_levels():
    assert totals(MIXED) == {"answer": 1.0, "call": 0.75, "style": 1.0, "brief": -2.0}


def test_every_level_is_weighted_and_the_scalar_is_their_sum():
    made = apply_weights(MIXED, {"answer": 2.0, "call": 4.0, "style": 0.0, "brief": 0.125}, [2, 1])
    assert made.reward == 2 + 3 + 0 - 0.25
    assert made.turns == [{"call": 0.5}, {"call": 0.25, "style": 1.0}] and made.turn_rewards == [
        2.0,
        1.0,
    ]
    assert [tokens.tolist() for tokens in made.token_rewards if tokens is not None] == [
        [0, -0.125],
        [-0.125],
    ]
    assert made.totals == totals(MIXED)  # as they were given: weights are not in the metrics


def test_without_weights_a_map_is_the_sum_of_its_values():
    made = apply_weights(normalize({"digits": 0.5, "finished": True}), {}, [3])
    assert (made.reward, made.totals, made.turn_rewards, made.token_rewards) == (
        1.5,
        {"digits": 0.5, "finished": 1.0},
        [0],
        [None],
    )
    assert normalize(0.5, "brief") == RewardBreakdown({"brief": 0.5})


def test_two_functions_add_their_names_at_every_level():
    both = merge(
        MIXED,
        RewardBreakdown(
            {"correct": 1.0}, [{"kind": 1.0}, {}], [{"even": [1.0, 0.0]}, {"even": [1.0]}]
        ),
    )
    assert totals(both) == {**totals(MIXED), "correct": 1.0, "kind": 1.0, "even": 2.0}
    assert both.turns[0] == {"call": 0.5, "kind": 1.0} and merge(
        MIXED, RewardBreakdown({"correct": 1.0})
    ).turns == list(MIXED.turns)
    assert apply_weights(both, {}, [2, 1]).token_rewards[0].tolist() == [1.0, -1.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("earned", "says"),
    [
        (
            RewardBreakdown(turns=[{"a": 1.0}]),
            "rewards of 1 turns and tokens of 0, where the policy had 2",
        ),
        (
            RewardBreakdown(tokens=[{"a": [1.0]}]),
            "rewards of 0 turns and tokens of 1, where the policy had 2",
        ),
        (
            RewardBreakdown(tokens=[{"a": [1.0]}, {"a": [1.0]}]),
            "reward 'a' has 1 numbers for a turn of 2 tokens",
        ),
    ],
)
def test_levels_that_do_not_fit_are_named(earned: RewardBreakdown, says: str):
    with pytest.raises(ValueError, match=says):
        apply_weights(earned, {}, [2, 1])


def test_a_name_that_two_functions_give_is_refused():
    with pytest.raises(ValueError, match="two reward functions give 'answer'"):
        merge(MIXED, RewardBreakdown({"answer": 1.0}))
