from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.buffer.advantages import rloo
from streamrl.buffer.groups import join_rollouts, score_group
from streamrl.stream.records import Turn
from streamrl.stream.records.sequences import (
    completions,
    sampled_counts,
    sampled_indices,
    sampled_turns,
)
from tests.support.build import floats, rollout, rollout_event, tokens, turns
from tests.support.groups import joined_group


def test_the_shared_prompt_is_kept_once():
    events = [
        rollout_event(i, rollout(sample=i, reward=float(i), turns=turns(response=range(3, 4 + i))))
        for i in range(3)
    ]
    record = joined_group(events)
    assert record.prompt.tolist() == [1, 2]
    assert record.lengths.tolist() == [1, 2, 3]
    assert record.tokens.tolist() == [3, 3, 4, 3, 4, 5]
    assert record.span_counts is None
    np.testing.assert_allclose(record.advantages, [-1.5, 0, 1.5])
    assert record.offsets.tolist() == [0, 1, 2]
    assert record.total_tokens == 3 * 2 + 6


def test_what_the_policy_did_not_sample_is_masked():
    user = Turn(message="no", role="user", tokens=tokens(8, 9))
    answer = Turn(message="5", role="assistant", tokens=tokens(5), logprobs=floats(-0.25))
    record = joined_group([rollout_event(0, rollout(turns=[*turns(response=[3]), user, answer]))])
    assert record.tokens.tolist() == [3, 8, 9, 5]
    assert sampled_indices(record).tolist() == [0, 3]
    assert record.policy_logprobs.tolist() == [-0.5, -0.25]


def test_only_what_all_prompts_begin_with_is_shared():
    events = [
        rollout_event(0, rollout(sample=0, turns=turns(prompt=[1, 2, 7]))),
        rollout_event(1, rollout(sample=1, turns=turns(prompt=[1, 2, 9]))),
    ]
    record = joined_group(events)
    assert record.prompt.tolist() == [1, 2]
    assert record.tokens.tolist() == [7, 3, 4, 5, 9, 3, 4, 5]
    assert sampled_indices(record).tolist() == [1, 2, 3, 5, 6, 7]


def test_a_group_refers_to_its_rollouts_and_has_none_of_their_tokens():
    events = [rollout_event(i + 7, rollout(sample=i, reward=float(i))) for i in range(2)]
    record = score_group(events, rloo)
    assert not hasattr(record, "tokens") and not hasattr(record, "policy_logprobs")
    assert record.prompt_length == 2 and record.offsets.tolist() == [7, 8]


def test_a_group_is_not_joined_with_rollouts_that_do_not_fit_it():
    record = score_group([rollout_event(0, rollout())], rloo)
    with pytest.raises(ValueError, match=r"group 'g0': tokens has shape \[2\], expected \[3\]"):
        join_rollouts(record, [rollout(turns=turns(response=[3, 4]))])


def asked(*ids: int, **fork: Any) -> Turn:
    return Turn(message="", role="user", tokens=tokens(*ids), **{"fork": bool(fork), **fork})


def said(*ids: int) -> Turn:
    logprobs = floats(*[-0.5] * len(ids))
    return Turn(message="", role="assistant", tokens=tokens(*ids), logprobs=logprobs)


# Its sequences are 1 2 3 4, 1 2 7 5 and 1 2 7 8 6. The second branches from the first after 1 2,
# the third from the second after 1 2 7.
FORKED = [
    asked(1, 2),
    said(3, 4),
    asked(7, fork_at=2),
    said(5),
    asked(8, fork_of=1, fork_at=3),
    said(6),
]


def test_what_a_fork_shares_with_an_earlier_sequence_is_there_once():
    other = [asked(1, 9), said(3)]
    events = [
        rollout_event(0, rollout(sample=0, turns=FORKED)),
        rollout_event(1, rollout(sample=1, turns=other)),
    ]
    record = joined_group(events)
    assert record.prompt.tolist() == [1] and record.tokens.tolist() == [2, 3, 4, 7, 5, 8, 6, 9, 3]
    assert record.branches_from is not None and record.branches_from.tolist() == [0, 1, 1, 0]
    assert record.branches_at is not None and record.branches_at.tolist() == [0, 1, 2, 0]
    after = [path.tolist() for path in completions(record, record.tokens)]
    assert after == [[2, 3, 4], [2, 7, 5], [2, 7, 8, 6], [9, 3]]
    assert record.tokens[sampled_indices(record)].tolist() == [3, 4, 5, 6, 3]
    assert rollout(turns=FORKED).total_tokens == 4 + 4 + 5


@pytest.mark.parametrize(
    "made",
    [
        turns(),
        FORKED,
        FORKED[:4],
        [said(1), said(2), asked(3), said(4)],
        [asked(1), said(2, 3), said(4)],
    ],
)
def test_a_group_has_as_many_sampled_tokens_and_turns_as_its_rollout(made: list[Turn]):
    record = rollout(turns=made)
    group = score_group([rollout_event(0, record)], rloo)
    assert sampled_counts(group).sum() == record.sampled_tokens
    assert sampled_turns(group).sum() == record.sampled_turns


def test_a_break_and_a_fork_begin_a_sampled_turn():
    assert rollout(turns=[said(1), said(2), asked(3), said(4)]).sampled_turns == 2
    assert rollout(turns=FORKED).sampled_turns == 3


def test_a_fork_at_the_end_of_the_prompt_branches_from_nothing():
    record = joined_group([rollout_event(0, rollout(turns=FORKED[:4]))])
    assert record.prompt.tolist() == [1, 2] and record.branches_at is not None
    assert record.branches_from is not None and not record.branches_from.any()
    assert [path.tolist() for path in completions(record, record.tokens)] == [[3, 4], [7, 5]]


def test_a_fork_within_the_prompt_of_its_group_shortens_it():
    record = joined_group(
        [rollout_event(0, rollout(turns=[*FORKED[:2], asked(9, fork_at=1), said(5)]))]
    )
    assert record.prompt.tolist() == [1]
    assert [path.tolist() for path in completions(record, record.tokens)] == [[2, 3, 4], [9, 5]]


@pytest.mark.parametrize(
    "turns",
    [
        [asked(1, fork_at=1), said(3)],  # of nothing
        [*FORKED[:2], asked(7, fork_of=1, fork_at=2), said(5)],  # of itself
        [*FORKED[:2], asked(7, fork_at=5), said(5)],  # after more tokens than there are
        [asked(1), asked(2, fork=True), said(3), asked(fork_at=1), said(5)],  # nothing was sampled
    ],
)
def test_a_fork_of_what_is_no_sequence_is_refused(turns: list[Turn]):
    with pytest.raises(ValueError, match="which is not an earlier one with as many tokens"):
        rollout(turns=turns)


def test_a_turn_that_is_no_fork_is_at_none():
    with pytest.raises(ValueError, match="fork_of 0 and fork_at 2 are no fork"):
        Turn(message="", role="user", tokens=tokens(1), fork_at=2)


def sent_to(*experts: int, layers: int = 1) -> np.ndarray:
    """The expert of each token, the same in all layers: (tokens, layers, 1) uint8."""
    return np.array([[[expert]] * layers for expert in experts], np.uint8)


def test_tokens_whose_experts_are_unknown_or_of_another_model_have_expert_0():
    first, second, third = (
        Turn(message="", role="assistant", tokens=tokens(n), logprobs=floats(-1)) for n in (3, 4, 5)
    )
    first = structs.replace(first, routed_experts=sent_to(7))
    third = structs.replace(third, routed_experts=sent_to(9, layers=2))
    made = rollout_event(0, rollout(turns=[turns()[0], first, second, third]))
    experts = joined_group([made]).routed_experts
    assert experts is not None and experts.tolist() == [[[7]], [[0]], [[0]]]
