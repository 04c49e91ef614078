from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records import Fate, columns_of_fate
from tests.support.build import rollout


def test_a_batch_is_named_by_the_fate_batched_and_by_no_other():
    where = {"environment": "copy", "partition": 0, "offsets": np.array([4, 5])}
    assert Fate(fate="expired", **where).batch is None
    with pytest.raises(ValueError, match="fate batched with batch None"):
        Fate(fate="batched", **where)
    with pytest.raises(ValueError, match="fate expired with batch 3"):
        Fate(fate="expired", batch=3, **where)
    with pytest.raises(ValueError, match=r"offsets has shape \[2\], expected \[1\]"):
        Fate(fate="expired", uids=["a"], **where)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"offsets": np.array(4)}, r"offsets has shape \[\], expected \[1\]"),
        ({"offsets": np.array([[4, 5]])}, r"offsets has shape \[1, 2\], expected \[2\]"),
        ({"offsets": np.array([4.0])}, "offsets must be integers, not float64"),
        ({"policy_versions": np.array(3)}, r"policy_versions has shape \[\], expected \[2\]"),
        ({"tokens": np.array([3])}, r"tokens has shape \[1\], expected \[2\]"),
        ({"rewards": np.array([3, 4])}, "rewards must be floats, not int64"),
        ({"policy_versions": np.array([3.0, 4.0])}, "policy_versions must be integers"),
    ],
)
def test_the_places_of_a_fate_are_a_list(fields: dict[str, Any], says: str):
    where: dict[str, Any] = {"environment": "copy", "partition": 0, "offsets": np.array([4, 5])}
    with pytest.raises(ValueError, match=says):
        Fate(fate="expired", **(where | fields))


def test_what_the_policy_did_travels_with_a_fate():
    rollouts = [rollout(reward=0.5), rollout(reward=1e300)]
    fate = Fate(
        fate="expired",
        environment="copy",
        partition=0,
        offsets=np.arange(2),
        **columns_of_fate(rollouts),
    )
    read = decode("fate/1", encode(fate))
    assert isinstance(read, Fate) and read.rewards is not None and read.tokens is not None
    assert read.rewards.tolist() == [0.5, float(np.finfo(np.float32).max)]
    assert read.tokens.tolist() == [3, 3]
