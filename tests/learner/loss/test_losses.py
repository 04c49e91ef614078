from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl.config import choices
from streamrl.learner.loss import losses
from streamrl.learner.loss.losses import (
    Clip,
    Loss,
    Tokens,
    cispo,
    clipped_ratio,
    divergence_named,
    grpo,
    gspo,
    k1,
    k2,
    k3,
    loss_named,
    ppo,
)
from streamrl.system.errors import ConfigError

# Ratios 1, 2 and 1/2, each once with a good token and once with a bad one; with epsilon 0.2 the
# range is 0.8 to 1.2.
RATIOS = np.array([1.0, 1.0, 2.0, 2.0, 0.5, 0.5, 1.1, 0.9], np.float32)
ADVANTAGES = np.array([3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 3.0, -3.0], np.float32)
POLICY = np.full(8, -0.7, np.float32)
CURRENT = POLICY + np.log(RATIOS)
CLIP = Clip(0.2, 0.2)
HIGHER = Clip(0.2, 0.28)


def tokens(
    current: object = CURRENT,
    advantages: object = ADVANTAGES,
    segments: object = tuple(range(1, 9)),
    mask: object = (1,) * 8,
) -> Tokens:
    """One row."""
    rows = (
        jnp.asarray(values, jnp.float32)[None] for values in (current, POLICY, advantages, mask)
    )
    return Tokens(*rows, jnp.asarray(segments, jnp.int32)[None])


def values(loss: Loss, clip: Clip = CLIP) -> np.ndarray:
    return np.asarray(loss(tokens(), clip))[0]


def slope(loss: Loss, clip: Clip = CLIP) -> np.ndarray:
    """d loss / d current of each token: (8,)."""
    return np.asarray(
        jax.grad(lambda current: loss(tokens(current), clip).sum())(jnp.asarray(CURRENT))
    )


def test_clipped_ratio_by_hand():
    # -A * (1, 1, 1.2, 1.2, 0.8, 0.8, 1.1, 0.9)
    expected = [-3.0, 3.0, -3.6, 3.6, -2.4, 2.4, -3.3, 2.7]
    np.testing.assert_allclose(values(clipped_ratio), expected, rtol=1e-6)


def test_clipped_ratio_has_no_gradient_outside_the_range_whatever_the_sign():
    # inside, d/d current = -A * ratio; of the ratios, 2 and 1/2 lie outside
    np.testing.assert_allclose(slope(clipped_ratio), [-3.0, 3.0, 0, 0, 0, 0, -3.3, 2.7], rtol=1e-6)


def test_ppo_by_hand():
    # the worse of clipped and unclipped: 6.0 and -1.5 are unclipped
    expected = [-3.0, 3.0, -3.6, 6.0, -1.5, 2.4, -3.3, 2.7]
    np.testing.assert_allclose(values(ppo), expected, rtol=1e-6)


def test_ppo_keeps_the_gradient_of_what_has_become_worse():
    # a bad token that is twice as likely, and a good one that is half as likely, still have one
    np.testing.assert_allclose(slope(ppo), [-3.0, 3.0, 0, 6.0, -1.5, 0, -3.3, 2.7], rtol=1e-6)


def test_the_largest_ratio_bounds_what_a_bad_token_costs():
    """Ratios 2, 3, 4 and e^8, of bad tokens and of a good one: above 3 a bad one costs 3 |A|, and
    has no gradient. A good one is clipped at 1.2 as ever.
    """
    current = POLICY + np.log([2, 3, 4, np.exp(8), 4, 1, 1, 1]).astype(np.float32)
    advantages = [-2, -2, -2, -2, 2, 0, 0, 0]
    clip = Clip(0.2, 0.2, ratio_max=3.0)
    given = np.asarray(ppo(tokens(current, advantages), clip))[0]
    np.testing.assert_allclose(given[:5], [4, 6, 6, 6, -2.4], rtol=1e-5)
    slopes = jax.grad(lambda values: ppo(tokens(values, advantages), clip).sum())
    found = np.asarray(slopes(jnp.asarray(current)))
    np.testing.assert_allclose(found[[0, 2, 3, 4]], [4, 0, 0, 0], rtol=1e-5)
    unbounded = np.asarray(ppo(tokens(current, advantages), CLIP))[0]
    assert unbounded[3] == pytest.approx(2 * np.exp(8), rel=1e-5)


def test_ppo_may_clip_higher():
    # good tokens may go up to 1.28; all else is as with ppo
    np.testing.assert_allclose(
        values(ppo, HIGHER), [-3.0, 3.0, -3.84, 6.0, -1.5, 2.4, -3.3, 2.7], rtol=1e-6
    )
    between = tokens(POLICY + np.log(1.25), np.full(8, 2.0))  # a ratio between the two ends
    assert np.asarray(ppo(between, HIGHER)) == pytest.approx(-2.5) and np.asarray(
        ppo(between, CLIP)
    ) == pytest.approx(-2.4)


def test_grpo_is_the_policy_gradient():
    np.testing.assert_allclose(values(grpo), -ADVANTAGES * CURRENT, rtol=1e-6)
    np.testing.assert_allclose(slope(grpo), -ADVANTAGES, rtol=1e-6)  # docs/design/grpo.md: no ratio


def test_cispo_clips_the_weight_and_not_the_gradient():
    # weights 1, 1, 1.28, 1.28, 1/2, 1/2 (not bounded from below), 1.1, 0.9
    weights = np.array([1, 1, 1.28, 1.28, 0.5, 0.5, 1.1, 0.9])
    np.testing.assert_allclose(values(cispo, HIGHER), -weights * ADVANTAGES * CURRENT, rtol=1e-6)
    np.testing.assert_allclose(slope(cispo, HIGHER), -weights * ADVANTAGES, rtol=1e-6)


def test_gspo_has_one_ratio_a_rollout():
    # rollout 1: ratios 1 and 2, the second token not sampled: s = 1. Rollout 2: ratios 2 and 1/2: s
    # = 1. Rollout 3: 2 and 2: s = 2, clipped to 1.2
    current = POLICY + np.log([1, 2, 2, 0.5, 2, 2, 9, 9])
    advantages = [3, 3, -3, -3, 3, 3, 0, 0]
    rollouts = [1, 1, 2, 2, 3, 3, 0, 0]
    mask = [1, 0, 1, 1, 1, 1, 0, 0]
    given = tokens(current, advantages, rollouts, mask)
    np.testing.assert_allclose(
        np.asarray(gspo(given, CLIP))[0, [0, 2, 3, 4, 5]], [-3, 3, 3, -3.6, -3.6], rtol=1e-6
    )
    # the mean over a rollout's tokens: its gradient is s * A / n for each, none beyond the range
    summed = jax.grad(
        lambda current: (
            (gspo(tokens(current, advantages, rollouts, mask), CLIP) * given.mask).sum() / 2
        )
    )(jnp.asarray(current))
    np.testing.assert_allclose(summed, [-1.5, 0, 1.5, 1.5, 0, 0, 0, 0], atol=1e-6)


def test_a_step_against_the_gradient_makes_good_tokens_likelier():
    for loss in map(loss_named, choices.LOSSES):
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
    np.testing.assert_allclose(
        estimate(reference + np.array([0.0, 0.5, -0.5], np.float32), reference),
        expected,
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize("distance", [-9999.0, -200.0, 200.0, 9999.0])
def test_a_log_ratio_beyond_what_float32_holds_is_cut(distance: float):
    """exp(88.8) is infinite. Value and gradient of every loss and estimator stay finite, whatever
    the sign of the advantage.
    """
    far = jnp.asarray(POLICY + np.float32(distance))
    for loss in map(loss_named, choices.LOSSES):
        value, gradient = jax.value_and_grad(
            lambda current, loss=loss: jnp.sum(loss(tokens(current), CLIP))
        )(far)
        assert np.isfinite(value) and np.isfinite(gradient).all()
    for estimate in map(divergence_named, choices.DIVERGENCES):
        value, gradient = jax.value_and_grad(
            lambda current, estimate=estimate: jnp.sum(estimate(current, jnp.asarray(POLICY)))
        )(far)
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_k3_of_nearly_equal_policies_is_not_negative():
    """d^2 / 2, to within d^3. In float32, exp(d) - d - 1 gives -6e-8 at -1e-6 and 0 at 1e-4."""
    d = np.array([-1e-6, 1e-6, 1e-4, 1e-3], np.float32)
    np.testing.assert_allclose(
        k3(np.zeros(4, np.float32), d), np.square(d.astype(np.float64)) / 2, rtol=0.1
    )


def test_k1_and_k3_estimate_the_divergence_and_k2_is_near():
    # the expectation over a distribution of three tokens, not a sample of it: unbiased estimators
    # are exact
    current = np.array([0.5, 0.3, 0.2], np.float64)
    reference = np.array([0.45, 0.33, 0.22], np.float64)
    true = float(np.sum(current * np.log(current / reference)))
    means = {
        name: float(
            np.sum(current * np.asarray(getattr(losses, name)(np.log(current), np.log(reference))))
        )
        for name in choices.DIVERGENCES
    }
    assert means["k1"] == pytest.approx(true, rel=1e-4) and means["k3"] == pytest.approx(
        true, rel=1e-3
    )
    assert means["k2"] == pytest.approx(true, rel=0.1) and means["k2"] != pytest.approx(
        true, rel=1e-3
    )


def test_names():
    for name in choices.LOSSES:
        assert loss_named(name) is getattr(losses, name.replace("-", "_"))
    for name in choices.DIVERGENCES:
        assert divergence_named(name) is getattr(losses, name)
    assert loss_named("streamrl.learner.loss.losses:clipped_ratio") is clipped_ratio


def test_an_unknown_name_is_a_config_error_with_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"^learner\.loss: 'clipped_ratio' is not known; did you mean 'clipped-ratio'\?$",
    ):
        loss_named("clipped_ratio")
    with pytest.raises(
        ConfigError, match=r"^learner\.kl\.estimator: 'k33' is not known; did you mean 'k3'\?$"
    ):
        divergence_named("k33")
    shipped = ", ".join(choices.LOSSES)
    with pytest.raises(
        ConfigError,
        match=rf"^learner\.loss: 'xyz' is not known; shipped: {shipped}; your own: MODULE:NAME$",
    ):
        loss_named("xyz")
    with pytest.raises(ConfigError, match=r"^learner\.loss: 'no\.such:loss' cannot be imported"):
        loss_named("no.such:loss")
    with pytest.raises(
        ConfigError,
        match=r"^learner\.kl\.estimator: module 'streamrl\.learner\.loss\.losses' has no 'k9'$",
    ):
        divergence_named("streamrl.learner.loss.losses:k9")


def test_the_losses_with_a_largest_ratio_are_those_that_the_run_file_takes_it_for():
    bounded = {name for name, known in choices.LOSSES.items() if known.dual_clip}
    far = tokens(POLICY + 8, [-1.0] * 8)
    clip = Clip(0.2, 0.2, ratio_max=3.0)
    changed = {
        name
        for name in choices.LOSSES
        if name != "gspo"
        and not np.allclose(loss_named(name)(far, clip), loss_named(name)(far, CLIP))
    }
    assert changed == bounded == {"ppo"}
