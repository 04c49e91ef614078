"""Policy gradient and cross entropy in one batch, on a policy that is a table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl.config.sections.learner import Learner
from streamrl.learner.loss.components import (
    compared_mask,
    components_of,
    cross_entropy,
    sampled_mask,
)
from streamrl.learner.model.examples import RlExample
from streamrl.learner.update import normalize_advantages
from tests.learner.loss.test_objective import TABLE, WHOLE, average, gradient, measured, predictions

MASK = WHOLE.loss_mask
# The rollout of the second row is a demonstration: whoever gave it was certain, and its advantage
# means nothing. The first row has both losses.
SHOWN = np.zeros_like(MASK)
SHOWN[1] = MASK[1]
BOTH = np.zeros_like(MASK)
BOTH[0] = MASK[0]


def mixed(gradient_weight: float = 1.0, demonstrated: float = 0.5) -> RlExample:
    return WHOLE._replace(
        policy_logprobs=WHOLE.policy_logprobs * (1 - SHOWN),
        policy_gradient_weights=(gradient_weight * MASK * (1 - SHOWN)).astype(np.float32),
        cross_entropy_weights=(demonstrated * SHOWN + 0.25 * BOTH).astype(np.float32),
    )


def test_the_mixed_loss_and_its_gradient_by_hand():
    """-A c where the policy sampled, -c where somebody showed it, both in the first row. All tokens
    stand in the denominator.
    """
    settings = Learner(loss="grpo", average="tokens", kl=None)
    taken = mixed(gradient_weight=2.0)

    def loss(table: Any) -> Any:
        current = predictions(table, WHOLE).logprobs
        reinforced = -2.0 * WHOLE.advantages * current * MASK * (1 - SHOWN)
        shown = -current * (0.5 * SHOWN + 0.25 * BOTH)
        return jnp.sum(reinforced + shown) / MASK.sum()

    expected, slope = jax.jit(jax.value_and_grad(loss))(TABLE)
    weights = average(settings, taken)
    np.testing.assert_allclose(gradient(settings, taken, weights), slope, atol=1e-6)
    found = measured(settings, taken)
    assert found["loss"] == pytest.approx(float(expected), abs=1e-6)
    current = np.asarray(predictions(TABLE, WHOLE).logprobs)
    assert found["cross_entropy"] == pytest.approx(-current[SHOWN + BOTH > 0].mean(), rel=1e-5)


def test_a_demonstration_is_neither_rejected_nor_taken_for_a_mismatch():
    """Its tokens are far from the policy, and a divergence is estimated at the policy's own."""
    settings = Learner.model_validate(
        {"kl": {"estimator": "k1"}, "correction": {"reject": {"distance": "k3", "above": 1e-3}}}
    )
    found = measured(settings, mixed())
    alone = measured(settings, WHOLE._replace(loss_mask=MASK * (1 - SHOWN)))
    for name in ("mismatch_kl", "rejected_frac", "ratio_max", "kl", "effective_sample_size"):
        assert found[name] == pytest.approx(alone[name], rel=1e-6), name
    taught = mixed(gradient_weight=0)
    weights = average(settings, taught)
    shown = gradient(settings, taught, weights)
    plain = Learner(kl=None)
    np.testing.assert_allclose(shown, gradient(plain, taught, weights), atol=1e-7)
    assert np.abs(shown).max() > 1e-3


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_the_weights_of_the_policy_gradient_alone_change_nothing(loss: str):
    settings = Learner.model_validate({"loss": loss, "kl": {"coefficient": 0.1}})
    said = WHOLE._replace(policy_gradient_weights=MASK, cross_entropy_weights=np.zeros_like(MASK))
    weights = average(settings, WHOLE)
    assert components_of(WHOLE) is None
    assert sampled_mask(jnp.asarray(MASK), components_of(said)).tolist() == MASK.tolist()
    np.testing.assert_allclose(
        gradient(settings, said, weights), gradient(settings, WHOLE, weights), atol=1e-7
    )


def test_one_of_the_weights_may_be_missing():
    both = components_of(WHOLE._replace(cross_entropy_weights=SHOWN))
    assert both is not None and both.policy_gradient.tolist() == MASK.tolist()
    both = components_of(WHOLE._replace(policy_gradient_weights=SHOWN))
    assert both is not None and not both.cross_entropy.any()
    assert cross_entropy(jnp.array([-0.5])).tolist() == [0.5]


def test_without_weights_of_losses_every_sampled_token_is_compared():
    assert compared_mask(WHOLE).tolist() == (MASK == 1).tolist()
    assert 0 < MASK.sum() < MASK.size


def test_advantages_are_scaled_by_those_that_train():
    taken = mixed()
    assert compared_mask(taken).tolist() == ((MASK > 0) & (SHOWN == 0)).tolist()
    spread = WHOLE.advantages[(MASK > 0) & (SHOWN == 0)].std()
    np.testing.assert_allclose(
        normalize_advantages(taken).advantages, WHOLE.advantages / spread, rtol=1e-6
    )


def test_the_gradient_of_the_distillation_by_hand():
    """k2 pulls the policy's own samples towards the teacher with (c - q), the slope of
    KL(policy || teacher). The demonstration is nobody's sample, and has no weight.
    """
    settings = Learner(loss="grpo", average="tokens", kl=None, teacher="t")
    teacher = (WHOLE.policy_logprobs + 0.4) * MASK
    pulled = (0.5 * MASK * (1 - SHOWN)).astype(np.float32)
    taken = mixed(gradient_weight=0)._replace(teacher_kl_weights=pulled, teacher_logprobs=teacher)
    found = np.asarray(predictions(TABLE, WHOLE).logprobs)

    def loss(table: Any) -> Any:
        current = predictions(table, WHOLE).logprobs
        slope = pulled * (found - teacher) * current
        return jnp.sum(slope - current * (0.5 * SHOWN + 0.25 * BOTH)) / MASK.sum()

    weights = average(settings, taken)
    expected = jax.jit(jax.grad(loss))(TABLE)
    np.testing.assert_allclose(gradient(settings, taken, weights), expected, atol=1e-6)
    distance = np.square(found - teacher)[pulled > 0] / 2
    assert measured(settings, taken)["teacher_kl"] == pytest.approx(distance.mean(), rel=1e-5)
    alone = taken._replace(teacher_logprobs=None)
    unasked = mixed(gradient_weight=0)
    np.testing.assert_allclose(
        gradient(settings, alone, weights), gradient(settings, unasked, weights), atol=1e-7
    )


def test_a_token_that_is_not_distilled_needs_no_logprob_of_the_teacher():
    settings = Learner(loss="grpo", kl=None, teacher="t")
    pulled = (MASK * (1 - SHOWN)).astype(np.float32)
    known = WHOLE.policy_logprobs + 0.4
    taken = WHOLE._replace(teacher_kl_weights=pulled, teacher_logprobs=known * (pulled > 0))
    unknown = taken._replace(teacher_logprobs=np.where(pulled > 0, known, np.nan))
    weights = average(settings, WHOLE)
    assert (pulled == 0).any()
    np.testing.assert_array_equal(
        gradient(settings, unknown, weights), gradient(settings, taken, weights)
    )


def test_a_teacher_that_agrees_with_the_policy_changes_nothing():
    settings = Learner(loss="grpo", kl=None)
    current = np.asarray(predictions(TABLE, WHOLE).logprobs) * MASK
    taken = WHOLE._replace(teacher_kl_weights=MASK, teacher_logprobs=current)
    weights = average(settings, WHOLE)
    np.testing.assert_allclose(
        gradient(settings, taken, weights), gradient(settings, WHOLE, weights), atol=1e-6
    )
