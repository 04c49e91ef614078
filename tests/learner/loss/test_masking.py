"""Two groups of two sequences: sampled tokens 10 to 15, prompts 0 to 2."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.assemble import assemble
from streamrl.learner.loss.masking import mask_untrainable
from streamrl.learner.model.examples import expand
from streamrl.stream.records import Batch
from tests.support.build import floats, group, spans


@pytest.fixture
def batch() -> Batch:
    made = assemble(
        [group(name="g0", sizes=(3, 3)), group(name="g1", sizes=(2, 4), prompt=3)], 7, 7, 2, 16
    )
    assert made is not None
    return made


def spoilt(batch: Batch, **changes: object) -> Batch:
    return msgspec.structs.replace(batch, **changes)


def of_sequence(batch: Batch) -> np.ndarray:
    return np.repeat(np.arange(len(batch.uids)), batch.lengths)


def test_a_batch_that_the_model_knows_stays_as_it_is(batch: Batch):
    found, masked = mask_untrainable(batch, int(batch.tokens.max()) + 1)
    assert found is batch and not masked.any()


def test_a_sampled_token_without_an_embedding_masks_its_sequence(batch: Batch):
    tokens = batch.tokens.copy()
    tokens[np.flatnonzero(of_sequence(batch) == 1)[2]] = 16
    found = mask_untrainable(spoilt(batch, tokens=tokens), 16)
    assert found.batch.tokens.max() < 16 and found.masked.tolist() == [False, True, False, False]
    dense = expand(*found)
    whole = expand(batch)
    assert dense.loss_mask.sum() == whole.loss_mask.sum() - batch.lengths[1]
    assert np.array_equal(dense.segment_ids, whole.segment_ids)  # it keeps its place


def test_what_branches_from_a_masked_sequence_is_masked_too(batch: Batch):
    tokens = batch.tokens.copy()
    tokens[np.flatnonzero(of_sequence(batch) == 0)[1]] = 99
    branches = np.array([0, 1, 0, 0], np.int32)
    forked = spoilt(
        batch,
        tokens=tokens,
        uids=["a", "a", "b", "c"],
        branches_from=branches,
        branches_at=2 * branches,
        max_seq_len=24,
    )
    assert mask_untrainable(forked, 16).masked.tolist() == [True, True, False, False]


def test_a_prompt_without_an_embedding_masks_its_group(batch: Batch):
    prompts = batch.prompts.copy()
    prompts[-1] = 99  # of g1
    found = mask_untrainable(spoilt(batch, prompts=prompts), 16)
    assert found.batch.prompts.max() < 16 and found.masked.tolist() == (batch.groups == 1).tolist()


def test_a_masked_sequence_leaves_the_values_of_the_others_where_they_were():
    first = structs.replace(
        group(name="g0", sizes=(3,)), **spans([0, 1, 1]), policy_logprobs=floats(-1, -2)
    )
    second = structs.replace(group(name="g1", sizes=(2,)), policy_logprobs=floats(-3, -4))
    made = assemble([first, second], 7, 7, row_count=1, max_seq_len=16)
    assert made is not None
    for masked, logprobs in (
        ([True, False], [0, 0, 0, 0, 0, 0, -3, -4, 0]),
        ([False, True], [0, 0, -1, -2, 0, 0, 0, 0, 0]),
    ):
        dense = expand(made, np.array(masked))
        assert dense.policy_logprobs[0, :9].tolist() == logprobs
        assert dense.loss_mask[0, :9].tolist() == [float(value < 0) for value in logprobs]


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_the_lowest_and_the_highest_temperature_train(batch: Batch, temperature: float):
    found = mask_untrainable(spoilt(batch, temperatures=np.array([1, temperature, 1, 1])), 16)
    assert not found.masked.any()


@pytest.mark.parametrize("temperature", [0.0, 1e-30, np.nan, np.inf, -1.0])
def test_a_temperature_that_nothing_can_be_divided_by_masks_its_sequence(
    batch: Batch, temperature: float
):
    found = mask_untrainable(spoilt(batch, temperatures=floats(1, temperature, 1, 1)), 16)
    assert found.masked.sum() == 1 and found.batch.temperatures.tolist() == [1] * 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"groups": np.array([0, 0, 1, 2], np.int32)},
            "batch 7: a sequence is of group 2, and there are 2",
        ),
        (
            {"rows": np.array([0, 0, 1, 2], np.int32)},
            "batch 7: a sequence is in row 2, and there are 2",
        ),
        ({"rows": np.array([0, 0, 1, -1], np.int32)}, "batch 7: a sequence is in row"),
        (
            {"rows": np.array([0, 0, 0, 0], np.int32)},
            "batch 7: row 0 is given 22 tokens, and holds 16",
        ),
        ({"lengths": np.array([-1, 7, 2, 4], np.int32)}, "batch 7: lengths: one is -1, not 0 to"),
        ({"row_count": 2**50}, "batch 7: 1125899906842624 rows of 16 tokens"),
        ({"max_seq_len": -1}, "batch 7: 2 rows of -1 tokens"),
    ],
)
def test_a_batch_that_does_not_fit_its_rows_is_said(
    batch: Batch, changes: dict[str, object], says: str
):
    with pytest.raises(ValueError, match=says):
        mask_untrainable(spoilt(batch, **changes), 16)
