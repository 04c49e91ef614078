"""One row: rollout 1 with ratios 1/2, 4 and rollout 2 with ratios 1, 3, then padding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from streamrl.config.sections.learner import Correction, ImportanceWeights, RatioLimit
from streamrl.learner.loss.corrections import (
    TokenCorrection,
    WeightSums,
    correct,
    effective_sample_size,
    mean_weight,
    weight_sums,
)

# Of numpy: JAX would start threads when this is imported, and tests.mutants forks.
SEGMENTS: Any = np.array([[1, 1, 2, 2, 0]], np.int32)
MASK: Any = np.array([[1.0, 1.0, 1.0, 1.0, 0.0]], np.float32)
D: Any = np.log(np.array([[0.5, 4.0, 1.0, 3.0, 1.0]], np.float32))


def token(highest: float) -> dict[str, object]:
    return {"by": "token", "limits": [0, highest]}


def sequence(highest: float) -> dict[str, object]:
    return {"by": "sequence", "limits": [0, highest]}


def k1(above: float) -> dict[str, object]:
    return {"distance": "k1", "above": above}


def corrected(**settings: object) -> TokenCorrection:
    return correct(Correction.model_validate(settings), D, MASK, SEGMENTS)


def weights(**settings: object) -> list[float]:
    return np.asarray(corrected(**settings).weights)[0, :4].tolist()


def kept(**settings: object) -> list[float]:
    return np.asarray(corrected(**settings).kept)[0].tolist()


def test_by_default_nothing_is_corrected():
    assert weights() == [1, 1, 1, 1] and kept() == [1, 1, 1, 1, 0]


def test_token_weights_truncated_and_masked():
    assert weights(weights=token(3.5)) == pytest.approx([0.5, 3.5, 1, 3])
    masked = {"by": "token", "beyond": "mask", "limits": [0.6, 3.5]}
    assert weights(weights=masked) == pytest.approx([0, 0, 1, 3])
    assert kept(weights=masked) == [0, 0, 1, 1, 0]
    truncated = {"by": "token", "limits": [0.6, 3.5]}
    assert weights(weights=truncated) == pytest.approx([0.6, 3.5, 1, 3])
    assert kept(weights=truncated) == [1, 1, 1, 1, 0]  # what is cut still trains


def test_sequence_weights_truncated_and_masked():
    # 1/2 * 4 = 2 and 1 * 3 = 3, for each token of their rollouts
    assert weights(weights=sequence(2.5)) == pytest.approx([2, 2, 2.5, 2.5])
    masked = {**sequence(2.5), "beyond": "mask"}
    assert weights(weights=masked) == pytest.approx([2, 2, 0, 0])
    assert kept(weights=masked) == [1, 1, 0, 0, 0]


def test_weights_of_a_long_rollout_stay_finite():
    d = jnp.full((1, 5), 100.0)
    settings = Correction(weights=ImportanceWeights(by="sequence", beyond="mask"))
    made = correct(settings, d, MASK, SEGMENTS)
    assert np.isfinite(np.asarray(made.weights)).all() and not np.asarray(made.kept).any()


# |log r|:      0.693, 1.386, 0, 1.099;  means of k1 over the rollouts: -0.347, -0.549
# log(r)^2 / 2: 0.240, 0.961, 0, 0.603;  means 0.601, 0.302
# r - log r - 1: 0.193, 1.614, 0, 0.901; means 0.903, 0.451
@pytest.mark.parametrize(
    ("reject", "above", "by_token", "by_sequence"),
    [
        ("k1", 0.7, [1, 0, 1, 0], [1, 1, 1, 1]),
        ("k1", 0.5, [0, 0, 1, 0], [1, 1, 0, 0]),
        ("k2", 0.5, [1, 0, 1, 0], [0, 0, 1, 1]),
        ("k2", 0.25, [1, 0, 1, 0], [0, 0, 0, 0]),
        ("k3", 1.0, [1, 0, 1, 1], [1, 1, 1, 1]),
        ("k3", 0.5, [1, 0, 1, 0], [0, 0, 1, 1]),
        ("geometric", 1.5, [1, 1, 0, 0], [1, 1, 0, 0]),  # sqrt(2) and sqrt(3)
        ("geometric", 1.3, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_rejection_by_hand(reject: str, above: float, by_token: list[int], by_sequence: list[int]):
    if reject == "geometric":
        assert kept(reject=RatioLimit(distance="geometric", above=above)) == [*by_token, 0]
        return
    by_one = {"distance": reject, "above": above}
    assert kept(reject=by_one) == [*by_token, 0]
    assert kept(reject={"distance": reject, "by": "sequence", "above": above}) == [*by_sequence, 0]


def test_geometric_looks_both_ways():
    settings = Correction(reject=RatioLimit(distance="geometric", above=1.5))
    rare = correct(settings, -D, MASK, SEGMENTS)
    assert np.asarray(rare.kept)[0].tolist() == [1, 1, 0, 0, 0]


def test_weights_and_rejection_are_separate_choices():
    both = corrected(weights=token(2), reject=k1(1.2))
    assert np.asarray(both.weights)[0, :4].tolist() == pytest.approx([0.5, 2, 1, 2]) and np.asarray(
        both.kept
    )[0].tolist() == [1, 0, 1, 1, 0]


def share(**settings: object) -> float:
    found = sums(**settings)
    return effective_sample_size(found.number, found.sum, found.squares)


def sums(**settings: object) -> WeightSums:
    made = Correction.model_validate(settings)
    found = weight_sums(made, D, correct(made, D, MASK, SEGMENTS), MASK, SEGMENTS)
    return WeightSums(*map(float, found))


def means(**settings: object) -> list[float]:
    """Of the weights in use, and before truncation and rejection."""
    found = sums(**settings)
    return [mean_weight(found.number, found.sum), mean_weight(found.number, found.untruncated)]


def test_the_mean_weights_by_hand():
    # no weights: of exp(d), 1/2 4 1 3
    assert means() == pytest.approx([8.5 / 4, 8.5 / 4])
    assert means(weights=token(2)) == pytest.approx([5.5 / 4, 8.5 / 4])
    # two rollouts, 2 and 3
    assert means(weights=sequence(2)) == pytest.approx([2, 2.5])
    masked = {**sequence(2.5), "beyond": "mask"}
    assert means(weights=masked) == pytest.approx([1, 2.5])
    # the third token of four is left
    assert means(weights=token(9), reject=k1(0.5)) == pytest.approx([1 / 4, 8.5 / 4])
    assert mean_weight(0, 0) == 0 and mean_weight(1, 0.5) == 0.5


def test_the_effective_sample_size_by_hand():
    # no weights: of exp(d), 1/2 4 1 3
    assert share() == pytest.approx(8.5**2 / (4 * (0.25 + 16 + 1 + 9)))
    assert share(weights=token(2)) == pytest.approx(5.5**2 / (4 * (0.25 + 4 + 1 + 4)))
    # two rollouts, 2 and 3
    assert share(weights=sequence(9)) == pytest.approx(5**2 / (2 * (4 + 9)))
    assert share(weights=sequence(2)) == pytest.approx(1)  # both cut down to 2
    # one token of four is left
    assert share(weights=token(9), reject=k1(0.5)) == pytest.approx(1 / 4)
    assert effective_sample_size(0, 0, 0) == 0
