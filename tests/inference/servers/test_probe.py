"""When a server and the learner are taken to compute the same model."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.config.run_file import parse
from streamrl.inference.servers.probe import (
    Mismatch,
    ProbeTolerance,
    compare_logprobs,
    probe_tolerance,
)

FLOAT32 = ProbeTolerance(0.02)
BF16 = ProbeTolerance(0.02, low_precision=True)


def test_mismatch_over_the_tokens_that_both_have():
    expected = np.array([-1.0, -2.0, -3.0], np.float32)
    assert compare_logprobs(expected, np.array([-1.0, -2.5], np.float32)) == Mismatch(
        0.5, 2, mean_abs=0.25, common_abs=0.5
    )
    assert compare_logprobs(expected, np.array([-1.0, np.nan, -3.0], np.float32)).max_abs == np.inf
    with pytest.raises(ValueError, match="no logprobs"):
        compare_logprobs(expected, np.array([], np.float32))


def off_by(far: int, distance: float) -> Mismatch:
    """Of 60 logprobs `far` are off by `distance`, and the others by 0.01."""
    distances = np.full(60, 0.01, np.float32)
    distances[:far] = distance
    return compare_logprobs(np.zeros(60, np.float32), distances)


def test_in_float32_no_token_may_be_off():
    assert FLOAT32.accepts(off_by(1, 0.02))
    assert not FLOAT32.accepts(off_by(1, 0.03))


def test_in_bf16_a_few_tokens_may_be_far_off_and_the_mean_may_not():
    assert BF16.accepts(off_by(3, 0.15))
    assert not BF16.accepts(off_by(4, 0.15))  # more than one in 20
    assert BF16.accepts(off_by(15, 0.04))
    assert not BF16.accepts(off_by(25, 0.04))  # 0.0225 in the mean
    lost = compare_logprobs(np.zeros(60, np.float32), np.array([np.nan] + 59 * [0.0], np.float32))
    assert not BF16.accepts(lost)


@pytest.mark.parametrize(
    ("settings", "is_low"),
    [
        ({}, False),
        ({"learner": {"precision": "bf16"}}, True),
        ({"inference": {"dtype": "bfloat16"}}, True),
    ],
)
def test_the_precision_is_low_if_that_of_either_is(settings: dict[str, object], is_low: bool):
    tolerance = probe_tolerance(parse({"run": "r", "envs": {"copy": {}}, **settings}))
    assert tolerance.low_precision == is_low


def far(mean: float) -> Mismatch:
    return compare_logprobs(np.zeros(60, np.float32), np.full(60, mean, np.float32))


@pytest.mark.parametrize(
    ("tolerance", "mismatch", "advised"),
    [
        (BF16, far(0.07), 0.11),  # 1.5 times 0.07, with two digits
        (BF16, off_by(30, 0.2), 0.16),  # in the mean 0.105, and common 0.2 / 4
        (BF16, off_by(4, 0.6), 0.23),  # the common one decides: 1.5 * 0.6 / 4
        (FLOAT32, off_by(1, 0.03), 0.045),
    ],
)
def test_the_error_names_a_tolerance_that_would_have_accepted_what_rounding_explains(
    tolerance: ProbeTolerance, mismatch: Mismatch, advised: float
):
    assert not tolerance.accepts(mismatch)
    assert f"set inference.probe_tolerance to {advised:g} (" in tolerance.advice(mismatch)
    assert tolerance._replace(value=advised).accepts(mismatch)


@pytest.mark.parametrize("mean", [0.25, 3.0, np.inf, np.nan])
def test_a_difference_that_rounding_does_not_explain_gets_no_tolerance(mean: float):
    for tolerance in (BF16, FLOAT32):
        advice = tolerance.advice(far(mean))
        assert "a weight was not reloaded" in advice and "probe_tolerance" not in advice


def test_in_bf16_what_was_measured_of_a_right_model_is_accepted_and_of_a_wrong_one_is_not():
    """SmolLM2-135M-Instruct (docs/models.md): mean and common difference of a text and of a chat,
    of random ids, and of one matrix that is wrong.
    """
    run = parse({"run": "r", "envs": {"copy": {}}, "model": {"path": "/m"}})
    tolerance = probe_tolerance(run)
    for mean, common in ((0.041, 0.124), (0.041, 0.140), (0.070, 0.187)):
        assert tolerance.accepts(Mismatch(0.256, 63, mean, common))
    for mean, common in ((0.358, 0.909), (0.246, 1.021), (0.447, 0.964)):
        assert not tolerance.accepts(Mismatch(1.3, 63, mean, common))


def test_a_pool_may_have_another_tolerance_as_quantized_weights_need():
    inference = {"pools": {"quantized": {"probe_tolerance": 0.5}}}
    run = parse({"run": "r", "envs": {"copy": {}}, "inference": inference})
    assert probe_tolerance(run) == ProbeTolerance(1e-3)
    assert probe_tolerance(run.of_pool("quantized")) == ProbeTolerance(0.5)
