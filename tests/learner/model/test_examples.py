import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.assemble import assemble, select_sequences
from streamrl.learner.model.examples import (
    expand,
    rollout_numbers,
    sampled_spans,
    to_dense,
    to_ragged,
)
from streamrl.stream.records import LossWeights, Turn
from streamrl.stream.records.sequences import split_ragged
from tests.support.build import floats, group, rollout, rollout_event, spans, tokens, turns
from tests.support.groups import joined_group


def test_the_worked_example_of_the_design_of_logprobs():
    # "What is 2+2?" is 7 tokens, "4" one; the row holds 8 positions, the last of which predicts
    # nothing
    batch = assemble([group(sizes=(1,), prompt=7)], 0, 0, row_count=1, max_seq_len=8)
    assert batch is not None
    dense = expand(batch)
    assert dense.loss_mask.tolist() == [[0, 0, 0, 0, 0, 0, 1, 0]]
    assert dense.policy_logprobs.tolist() == [[0, 0, 0, 0, 0, 0, batch.policy_logprobs[0], 0]]


def test_a_first_token_that_was_sampled_has_no_predictor():
    batch = assemble([group(sizes=(2, 3), prompt=0)], 0, 0, row_count=1, max_seq_len=6)
    assert batch is not None
    dense = expand(batch)
    assert dense.segment_ids.tolist() == [[1, 1, 2, 2, 2, 0]]
    assert dense.loss_mask.tolist() == [[1, 0, 1, 1, 0, 0]]


def test_split_ragged():
    assert [part.tolist() for part in split_ragged(np.arange(5), np.array([2, 0, 3]))] == [
        [0, 1],
        [],
        [2, 3, 4],
    ]


def test_two_groups_become_dense_rows():
    # group a: prompt 1 2, rollouts 10 | 11 12; group b: prompt 1, rollout 10 11 12. Rows of 6: [a1
    # (4) ..], [b0 (4)], [a0 (3)]
    batch = assemble(
        [group("a", "ga", sizes=(1, 2), prompt=2), group("b", "gb", sizes=(3,), prompt=1)],
        0,
        0,
        row_count=3,
        max_seq_len=6,
    )
    assert batch is not None and batch.rows.tolist() == [2, 0, 1]
    dense = expand(batch)
    assert dense.input_ids.tolist() == [
        [1, 2, 11, 12, 0, 0],
        [1, 10, 11, 12, 0, 0],
        [1, 2, 10, 0, 0, 0],
    ]
    assert dense.loss_mask.tolist() == [[0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert dense.segment_ids.tolist() == [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0],
    ]
    assert dense.position_ids.tolist() == [
        [0, 1, 2, 3, 0, 0],
        [0, 1, 2, 3, 0, 0],
        [0, 1, 2, 0, 0, 0],
    ]
    assert dense.policy_logprobs.tolist()[0] == [0, -0.5, -0.5, 0, 0, 0]
    assert dense.advantages.tolist() == [
        [0, 1, 1, 0, 0, 0],
        [-1, -1, -1, 0, 0, 0],
        [0, -1, 0, 0, 0, 0],
    ]
    assert dense.temperatures.tolist()[0] == [1] * 6


def test_several_rollouts_share_a_row():
    batch = assemble([group(sizes=(1, 1), prompt=1)], 0, 0, row_count=1, max_seq_len=4)
    assert batch is not None
    dense = expand(batch)
    assert dense.input_ids.tolist() == [[1, 10, 1, 11]]
    assert dense.segment_ids.tolist() == [[1, 1, 2, 2]]
    assert dense.position_ids.tolist() == [[0, 1, 0, 1]]
    assert dense.loss_mask.tolist() == [[1, 0, 1, 0]]


def test_advantages_by_token_stand_where_the_token_is_predicted_beside_groups_that_have_none():
    finer = structs.replace(
        group("a", "ga", sizes=(1, 2), prompt=2), token_advantages=floats(0.5, 2, -2)
    )
    batch = assemble(
        [finer, group("b", "gb", sizes=(2,), prompt=1)], 0, 0, row_count=3, max_seq_len=4
    )
    assert (
        batch is not None
        and batch.token_advantages is not None
        and batch.token_advantages.tolist() == [0.5, 2, -2, -1, -1]
    )
    assert expand(batch).advantages.tolist() == [[0, 2, -2, 0], [0, 0.5, 0, 0], [-1, -1, 0, 0]]
    kept = select_sequences(finer, np.array([False, True]))
    assert kept.token_advantages is not None and kept.token_advantages.tolist() == [2, -2]


def test_what_is_said_of_tokens_goes_to_rows_and_back():
    """Two sequences in one row, behind a prompt of two; one in another, behind none: its first
    token has no predictor.
    """
    batch = assemble(
        [group("copy", "g0", sizes=(2, 1), prompt=2), group("copy", "g1", sizes=(3,), prompt=0)],
        0,
        0,
        row_count=2,
        max_seq_len=8,
    )
    assert batch is not None and batch.rows.tolist() == [0, 0, 1]
    assert list(sampled_spans(batch)) == [(0, 1, 0, 2), (1, 5, 2, 1), (2, 8, 4, 2)]
    values = np.array([-1, -2, -3, 0, -5, -6], np.float32)
    rows = to_dense(batch, values)
    np.testing.assert_array_equal(rows, [[0, -1, -2, 0, 0, -3, 0, 0], [-5, -6, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(to_ragged(batch, rows), values)
    np.testing.assert_array_equal(
        to_dense(batch, batch.policy_logprobs), expand(batch).policy_logprobs
    )
    with pytest.raises(ValueError, match="batch 0 has 6 sampled tokens, and 5 scores"):
        to_dense(batch, values[:5])


def test_the_sequences_of_a_rollout_that_forked_have_its_number():
    """Rollout a is two sequences, in two rows; b lies behind the first one. Prompts of one
    token.
    """
    made = assemble([group(sizes=(2, 1, 3), prompt=1)], 0, 0, row_count=2, max_seq_len=6)
    assert made is not None and rollout_numbers(made) is None
    forked = structs.replace(made, uids=["a", "b", "a"], rows=np.array([0, 0, 1], np.int32))
    found = rollout_numbers(forked)
    assert found is not None and found.tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
    assert ((found > 0) == (expand(forked).segment_ids > 0)).all()


def test_a_branch_is_laid_out_with_what_it_shares():
    """Sequences 10 11 12 and 10 11 | 13 14 after a prompt of one token; of the second 14 was
    sampled.
    """
    forked = structs.replace(
        group(sizes=(3, 2), prompt=1),
        uids=["a", "a"],
        branches_from=np.array([0, 1], np.int32),
        branches_at=np.array([0, 2], np.int32),
        policy_logprobs=floats(-1, -2, -3, -4),
        advantages=floats(2, 2),
        routed_experts=sent_to(3, 5, 7, 9, 11),
        **spans([1, 1, 1], [0, 1]),
    )
    batch = assemble([forked, group("b", "gb", sizes=(1,), prompt=1)], 0, 0, 1, 12)
    assert batch is not None and batch.branches_at is not None
    assert batch.branches_at.tolist() == [0, 2, 0]
    dense = expand(batch)
    assert dense.input_ids.tolist() == [[1, 10, 11, 12, 1, 10, 11, 13, 14, 1, 10, 0]]
    assert dense.segment_ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 0]]
    assert dense.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 0]]
    assert dense.policy_logprobs.tolist() == [[-1, -2, -3, 0, 0, 0, 0, -4, 0, -0.5, 0, 0]]
    assert dense.advantages.tolist()[0][:9] == [2, 2, 2, 0, 0, 0, 0, 2, 0]
    assert dense.routed_experts is not None
    assert dense.routed_experts[0, :9, 0, 0].tolist() == [0, 3, 5, 7, 0, 3, 5, 9, 11]
    values = floats(-1, -2, -3, -4, -5)
    np.testing.assert_array_equal(to_ragged(batch, to_dense(batch, values)), values)


def test_routed_experts_travel_from_the_turn_to_the_place_of_their_token():
    """Two rollouts behind a prompt of two tokens; a tool's answer, of which nothing is known, lies
    within the first. One layer; each token was sent to two experts.
    """
    asked, said = turns(response=(3, 4))
    tool = structs.replace(asked, tokens=tokens(1))
    asked = structs.replace(asked, routed_experts=sent_to(1, 2))
    said = structs.replace(said, routed_experts=sent_to(3, 0))
    events = [
        rollout_event(0, rollout(sample=0, reward=1.0, turns=[asked, said, tool])),
        rollout_event(1, rollout(sample=1, turns=[asked, said])),
    ]
    scored = joined_group(events)
    assert scored.routed_experts is not None and scored.prompt_routed_experts is not None
    assert scored.routed_experts[:, 0, 0].tolist() == [3, 0, 0, 3, 0]
    assert scored.prompt_routed_experts[:, 0, 0].tolist() == [1, 2]
    second = select_sequences(scored, np.array([False, True])).routed_experts
    assert second is not None and second[:, 0, 0].tolist() == [3, 0]
    silent = group("b", "gb", sizes=(2,), prompt=1)
    other = structs.replace(silent, routed_experts=np.ones((2, 3, 1), np.uint8))
    for unknown in (silent, other):  # other: of a model with three layers
        batch = assemble([scored, unknown], 0, 0, row_count=2, max_seq_len=9)
        assert batch is not None
        dense = expand(batch).routed_experts
        assert dense is not None and dense.shape == (2, 9, 1, 2) and dense.dtype == np.uint8
        assert dense[0, :, 0, 0].tolist() == [1, 2, 3, 0, 0, 1, 2, 3, 0]
        assert dense[0, 2].tolist() == [[3, 4]] and not dense[1].any()
    without = assemble([silent], 0, 0, row_count=1, max_seq_len=7)
    assert without is not None and expand(without).routed_experts is None


def sent_to(*first: int) -> np.ndarray:
    """Each token's first expert, and the next one; 0: not known. (tokens, 1, 2) uint8."""
    return np.array([[[one, one + (one > 0)]] for one in first], np.uint8)


def test_experts_that_do_not_fit_their_tokens_are_refused():
    with pytest.raises(
        ValueError, match=r"turn routed_experts has shape \[2, 1, 2\], expected \[1,"
    ):
        Turn(
            message="", role="assistant", tokens=np.ones(1, np.uint16), routed_experts=sent_to(1, 2)
        )
    scored = group("b", "gb", sizes=(2,), prompt=1)
    with pytest.raises(ValueError, match="prompt_routed_experts do not fit routed_experts"):
        structs.replace(scored, prompt_routed_experts=sent_to(1))
    with pytest.raises(ValueError, match="routed_experts must be uint8 or uint16, not int32"):
        structs.replace(scored, routed_experts=sent_to(1, 2).astype(np.int32))


def test_the_weights_of_losses_travel_from_env_and_turn_to_the_dense_rows():
    """The policy's answer trains as the env says; what a teacher wrote after it, as the turn says.
    The rollouts of another env have the policy gradient alone.
    """
    asked, said = turns(response=(3, 4))
    shown = structs.replace(
        said, loss=LossWeights(policy_gradient=0, cross_entropy=2), logprobs=floats(0, 0)
    )
    events = [rollout_event(0, rollout(turns=[asked, said, asked, shown]))]
    scored = joined_group(events, lambda rewards: rewards, LossWeights(cross_entropy=0.5))
    assert scored.policy_gradient_weights is not None and scored.cross_entropy_weights is not None
    assert scored.policy_gradient_weights.tolist() == [1, 1, 0, 0]
    assert scored.cross_entropy_weights.tolist() == [0.5, 0.5, 2, 2]
    other = group("b", "gb", sizes=(2,), prompt=1)
    batch = assemble([scored, other], 0, 0, row_count=2, max_seq_len=8)
    assert batch is not None and batch.policy_gradient_weights is not None
    assert batch.policy_gradient_weights.tolist() == [1, 1, 0, 0, 1, 1]
    dense = expand(batch)
    assert dense.policy_gradient_weights is not None and dense.cross_entropy_weights is not None
    assert dense.policy_gradient_weights.tolist() == [
        [0, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert dense.cross_entropy_weights.tolist() == [[0, 0.5, 0.5, 0, 0, 2, 2, 0], [0] * 8]
    plain = joined_group([rollout_event(0, rollout())], lambda rewards: rewards)
    assert plain.policy_gradient_weights is None and plain.cross_entropy_weights is None


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_weight_of_a_loss_that_is_none_is_refused(weight: float):
    with pytest.raises(ValueError, match="each must be finite and at least 0"):
        LossWeights(cross_entropy=weight)
