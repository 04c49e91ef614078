from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl.errors import ConfigError
from streamrl.learner import losses
from streamrl.learner.losses import DIVERGENCES, LOSSES, Loss, clipped_ratio, divergence_named, k1, k2, k3, loss_named, masked_mean, ppo

# Ratios 1, 2 and 1/2, each once with a good token and once with a bad one; with epsilon 0.2 the range is 0.8 to 1.2.
RATIOS = np.array([1.0, 1.0, 2.0, 2.0, 0.5, 0.5, 1.1, 0.9], np.float32)
ADVANTAGES = np.array([3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 3.0, -3.0], np.float32)
POLICY = np.full(8, -0.7, np.float32)
CURRENT = POLICY + np.log(RATIOS)
EPSILON = 0.2


def test_clipped_ratio_by_hand():
    expected = [-3.0, 3.0, -3.6, 3.6, -2.4, 2.4, -3.3, 2.7]  # -A * (1, 1, 1.2, 1.2, 0.8, 0.8, 1.1, 0.9)
    np.testing.assert_allclose(clipped_ratio(CURRENT, POLICY, ADVANTAGES, EPSILON), expected, rtol=1e-6)


def test_ppo_by_hand():
    expected = [-3.0, 3.0, -3.6, 6.0, -1.5, 2.4, -3.3, 2.7]  # the worse of clipped and unclipped: 6.0 and -1.5 are unclipped
    np.testing.assert_allclose(ppo(CURRENT, POLICY, ADVANTAGES, EPSILON), expected, rtol=1e-6)


def slope(loss: Loss) -> np.ndarray:
    """d loss / d current of each token: (8,)."""
    return np.asarray(jax.grad(lambda current: loss(current, jnp.asarray(POLICY), jnp.asarray(ADVANTAGES), EPSILON).sum())(jnp.asarray(CURRENT)))


def test_clipped_ratio_has_no_gradient_outside_the_range_whatever_the_sign():
    # inside, d/d current = -A * ratio; of the ratios, 2 and 1/2 lie outside
    np.testing.assert_allclose(slope(clipped_ratio), [-3.0, 3.0, 0, 0, 0, 0, -3.3, 2.7], rtol=1e-6)


def test_ppo_keeps_the_gradient_of_what_has_become_worse():
    # a bad token that is twice as likely, and a good one that is half as likely, still have one
    np.testing.assert_allclose(slope(ppo), [-3.0, 3.0, 0, 6.0, -1.5, 0, -3.3, 2.7], rtol=1e-6)


def test_a_step_against_the_gradient_makes_good_tokens_likelier():
    for loss in LOSSES.values():
        assert np.all(slope(loss)[:2] * ADVANTAGES[:2] < 0)


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (k1, [0.0, 0.5, -0.5]),
        (k2, [0.0, 0.125, 0.125]),
        (k3, [0.0, 0.10653066, 0.14872127]),  # e^-0.5 + 0.5 - 1, e^0.5 - 0.5 - 1
    ],
)
def test_divergences_by_hand(estimate: losses.Divergence, expected: list[float]):
    reference = np.array([-1.0, -1.0, -1.0], np.float32)
    np.testing.assert_allclose(estimate(reference + np.array([0.0, 0.5, -0.5], np.float32), reference), expected, rtol=1e-5, atol=1e-7)


def test_k1_and_k3_estimate_the_divergence_and_k2_is_near():
    # the expectation over a distribution of three tokens, not a sample of it: unbiased estimators are exact
    current, reference = np.array([0.5, 0.3, 0.2], np.float64), np.array([0.45, 0.33, 0.22], np.float64)
    true = float(np.sum(current * np.log(current / reference)))
    means = {name: float(np.sum(current * np.asarray(d(np.log(current), np.log(reference))))) for name, d in DIVERGENCES.items()}
    assert means["k1"] == pytest.approx(true, rel=1e-4) and means["k3"] == pytest.approx(true, rel=1e-3)
    assert means["k2"] == pytest.approx(true, rel=0.1) and means["k2"] != pytest.approx(true, rel=1e-3)


def test_masked_mean_divides_by_the_tokens_of_the_mask():
    values, mask = np.array([[1.0, 2.0, 100.0], [3.0, 100.0, 100.0]], np.float32), np.array([[1, 1, 0], [1, 0, 0]], np.float32)
    assert float(masked_mean(values, mask)) == 2.0  # (1 + 2 + 3) / 3 tokens; not the mean of the rows' means, 2.25, nor 6 / 6


def test_masked_mean_of_nothing_is_nothing():
    assert float(masked_mean(np.ones(3, np.float32), np.zeros(3, np.float32))) == 0.0


def test_what_is_masked_out_cannot_spoil_the_mean_nor_its_gradient():
    values, mask = jnp.array([2.0, jnp.nan, jnp.inf]), jnp.array([1.0, 0.0, 0.0])
    assert float(masked_mean(values, mask)) == 2.0
    assert jax.grad(lambda v: masked_mean(v, mask))(values).tolist() == [1.0, 0.0, 0.0]


def test_names():
    assert {loss_named(name) for name in ("ppo", "clipped-ratio")} == {ppo, clipped_ratio}
    assert [divergence_named(name) for name in ("k1", "k2", "k3")] == [k1, k2, k3]
    assert loss_named("streamrl.learner.losses:clipped_ratio") is clipped_ratio


def test_an_unknown_name_is_a_config_error_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^learner\.loss: 'clipped_ratio' is not known; did you mean 'clipped-ratio'\?$"):
        loss_named("clipped_ratio")
    with pytest.raises(ConfigError, match=r"^learner\.kl: 'k33' is not known; did you mean 'k3'\?$"):
        divergence_named("k33")
    with pytest.raises(ConfigError, match=r"^learner\.loss: 'xyz' is not known; shipped: ppo, clipped-ratio; your own: MODULE:NAME$"):
        loss_named("xyz")
    with pytest.raises(ConfigError, match=r"^learner\.loss: 'no\.such:loss' cannot be imported"):
        loss_named("no.such:loss")
    with pytest.raises(ConfigError, match=r"^learner\.kl: module 'streamrl\.learner\.losses' has no 'k9'$"):
        divergence_named("streamrl.learner.losses:k9")
