"""A rollout or a turn that is invalid cannot be made."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from streamrl.stream.log.codec import encode
from streamrl.stream.records import LossWeights, Turn, VersionSpan, Visit
from tests.support.build import floats, rollout, tokens


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"reward": float("nan")}, "a reward is not finite"),
        ({"temperature": 0.0}, "temperature 0.0 is not above 0"),
        ({"policy_version": 3, "newest_policy_version": 2}, "versions 3 to 2 are not a span"),
        ({"rollout_uid": ""}, "must not be empty"),
        ({"turns": []}, "no turn was sampled"),
    ],
)
def test_an_invalid_rollout_cannot_be_made(fields: dict[str, object], says: str):
    with pytest.raises(ValueError, match=says):
        rollout(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("logprobs", "says"),
    [
        (floats(-1, -2), r"shape \[2\], expected \[1\]"),
        (floats(np.nan), "value 0 is not finite"),
        (np.array([-1.0]), "must be float32"),
    ],
)
def test_logprobs_that_do_not_fit_their_tokens_are_refused(logprobs: np.ndarray, says: str):
    with pytest.raises(ValueError, match=says):
        Turn(message="", role="assistant", tokens=tokens(1), logprobs=logprobs)


def test_version_spans_are_compact():
    assert msgpack.unpackb(encode(VersionSpan(version=3, start=0, end=5))) == [3, 0, 5]


def test_versions_fit_into_what_they_travel_in():
    rollout(version=2**31 - 1)
    with pytest.raises(ValueError, match="are not a span"):
        rollout(version=0, newest=2**31)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_the_weight_of_a_loss_is_finite_and_at_least_0(weight: float):
    with pytest.raises(ValueError, match="each must be finite and at least 0"):
        LossWeights(cross_entropy=weight)


@pytest.mark.parametrize(("passed", "rollouts"), [(3, 2), (-1, 2), (0, 0)])
def test_no_more_rollouts_pass_than_there_are(passed: int, rollouts: int):
    with pytest.raises(ValueError, match=f"visit of problem 4: {passed} of {rollouts} rollouts"):
        Visit(environment="copy", problem=4, epoch=0, passed=passed, rollouts=rollouts)
