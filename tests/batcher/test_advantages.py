from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher import process
from streamrl.batcher.advantages import (
    NORMALIZER_OF,
    normalize_batch,
    normalized,
    normalizer_named,
)
from streamrl.batcher.assemble import assemble
from streamrl.buffer.advantages import advantage_named
from streamrl.config import choices, run_file
from streamrl.learner.model.examples import expand
from streamrl.stream.records import Batch
from streamrl.system.errors import ConfigError
from tests.support.batcher import CONFIG, arrivals, step_once
from tests.support.build import floats, group, spans, version_event


def test_normalized_by_hand():
    # mean 1, deviations 3, -1, -1, -1, standard deviation sqrt(12 / 4)
    batch = floats(4, 0, 0, 0)
    np.testing.assert_allclose(
        normalized(batch, batch), np.array([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-6
    )
    # other values, the same scale
    np.testing.assert_allclose(
        normalized(floats(1, 10), batch), np.array([0, 9]) / np.sqrt(3), rtol=1e-6
    )


def test_equal_ones_give_none_as_does_nothing():
    assert normalized(floats(*[0.1] * 5), floats(*[0.1] * 5)).tolist() == [0] * 5
    assert normalized(floats(), floats()).shape == (0,)


def test_where_all_rollouts_are_equal_tokens_are_centred_only():
    np.testing.assert_allclose(normalized(floats(0.5, 0.1), floats(0.1, 0.1)), [0.4, 0], atol=1e-7)


def test_reinforce_plus_plus_takes_the_batch_for_its_baseline_and_with_one_each_groups():
    """Two problems, one easy: the plain one calls every try at it good, the one with a baseline
    does not.
    """
    easy = floats(1, 0.8)
    hard = floats(0.2, 0)
    plain, based = (
        normalizer_named(NORMALIZER_OF[name])(both, both)
        for name in ("reinforce++", "reinforce++-baseline")
        for both in [np.concatenate([advantage_named(name)(easy), advantage_named(name)(hard)])]
    )
    np.testing.assert_allclose(plain, np.array([0.5, 0.3, -0.3, -0.5]) / np.sqrt(0.17), rtol=1e-5)
    np.testing.assert_allclose(based, [1, -1, 1, -1], rtol=1e-5)


def test_the_batcher_adds_its_stage():
    """Advantages -1 and 1 in each of two groups; scaled by an own function, which changes nothing
    else.
    """
    events = [version_event(0), *arrivals("a", "b")]
    plain, doubled = (
        next(
            o.record
            for o in step_once(events, replace(CONFIG, advantage=name))
            if isinstance(o.record, Batch)
        )
        for name in ("none", "tests.batcher.test_advantages:doubled")
    )
    assert plain.advantages.tolist() == [-1, 1, -1, 1] and doubled.advantages.tolist() == [
        -2,
        2,
        -2,
        2,
    ]
    assert plain.uids == doubled.uids and plain.tokens.tolist() == doubled.tokens.tolist()


def doubled(values: np.ndarray, over: np.ndarray) -> np.ndarray:
    return values * np.float64(2)


def test_tokens_advantages_are_scaled_as_their_rollouts_are():
    """Rollouts 0 and 4, so mean 2 and standard deviation 2; the second one's sampled tokens have 4,
    2 and 0, and one of its tokens was not sampled.
    """
    by_token = structs.replace(
        group(sizes=(1, 4)),
        advantages=floats(0, 4),
        token_advantages=floats(0, 4, 2, 0),
        policy_logprobs=floats(-1, -1, -1, -1),
        **spans([1], [1, 0, 1, 1]),
    )
    batch = assemble([by_token], 7, 7, row_count=2, max_seq_len=10)
    assert batch is not None
    result = normalize_batch(batch, normalized)
    assert result.advantages.tolist() == [-1, 1]
    assert result.token_advantages is not None
    assert result.token_advantages.tolist() == [-1, 1, 0, -1]
    example = expand(result)
    assert sorted(example.advantages[example.loss_mask > 0].tolist()) == [-1, -1, 0, 1]
    # the batch it was made of stays
    assert batch.token_advantages is not None and batch.token_advantages.tolist() == [0, 4, 2, 0]


def test_a_rollout_that_forked_counts_once():
    """Advantages 0 and 3, the second rollout in two sequences: mean 1.5, not 2."""
    forked = structs.replace(
        group(sizes=(1, 1, 1)), uids=["a", "b", "b"], advantages=floats(0, 3, 3)
    )
    batch = assemble([forked], 7, 7, row_count=2, max_seq_len=10)
    assert batch is not None and normalize_batch(batch, normalized).advantages.tolist() == [
        -1,
        1,
        1,
    ]


def test_what_cannot_be_used_names_the_batch():
    batch = assemble([group()], 7, 7, row_count=2, max_seq_len=10)
    assert batch is not None and normalize_batch(batch, doubled).advantages.dtype == np.float32
    for stage in (lambda values, over: values[:1], lambda values, over: values / 0):
        with (
            pytest.raises(ValueError, match="batch 7: batcher.advantage returned"),
            np.errstate(all="ignore"),
        ):
            normalize_batch(batch, stage)


def test_a_method_brings_the_stage_it_needs_and_a_run_file_may_choose_another():
    assert NORMALIZER_OF.keys() < choices.ADVANTAGES.keys()
    assert {*NORMALIZER_OF.values()} <= choices.BATCH_NORMALIZERS.keys()
    for chosen, expected in (
        ({}, "none"),
        ({"buffer.advantage": "reinforce++"}, "normalize"),
        ({"batcher.advantage": "normalize"}, "normalize"),
    ):
        run = run_file.with_overrides(
            run_file.parse({"run": "r", "envs": {"copy": {}}}),
            [f"{name}={value}" for name, value in chosen.items()],
        )
        assert process.make_processor(run).config.advantage == expected
    with pytest.raises(
        ConfigError,
        match=r"batcher.advantage: 'normalise' is not known; did you mean 'normalize'\?",
    ):
        normalizer_named("normalise")


def test_rollouts_that_the_policy_gradient_does_not_train_are_no_part_of_the_scale():
    batch = assemble([group(sizes=(1, 2, 1))], 0, 0, row_count=1, max_seq_len=16)
    assert batch is not None
    batch = structs.replace(
        batch, advantages=floats(1, 100, 3), policy_gradient_weights=floats(1, 0, 0, 0.5)
    )
    found = normalize_batch(batch, normalized)
    np.testing.assert_allclose(found.advantages[[0, 2]], [-1, 1])
