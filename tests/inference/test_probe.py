"""When a server and the learner are taken to compute the same model."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.config.run_file import parse
from streamrl.inference.probe import Mismatch, ProbeTolerance, compare_logprobs, probe_tolerance

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
