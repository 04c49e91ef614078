"""The objective: the weighted sum of the tokens' losses, with off-policy corrections and the
divergence from the reference.

It is a pure function of logprobs, so tests can check it on a policy that is a table. Every number
here adds up over the micro-batches of a batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.metrics import Metric, ReductionType

from streamrl.config.sections.learner import Kl, Learner
from streamrl.learner.loss import segments
from streamrl.learner.loss.components import Components, components_of, cross_entropy, sampled_mask
from streamrl.learner.loss.corrections import (
    TokenCorrection,
    WeightSums,
    correct,
    effective_sample_size,
    mean_weight,
    weight_sums,
)
from streamrl.learner.loss.losses import (
    Clip,
    Divergence,
    Loss,
    Tokens,
    clip_ratio,
    divergence_named,
    k2,
    k3,
    loss_named,
    ratio,
)
from streamrl.learner.model.examples import RlExample
from streamrl.learner.model.head import Predictions
from streamrl.learner.model.model import predict, unnamed

Metrics = dict[str, Metric]
# what the effective sample size and the mean weights are made of
WEIGHT_SUMS = tuple(f"weights_{name}" for name in WeightSums._fields)


class TermInputs(NamedTuple):
    """What the terms of the loss are computed from. All arrays are (rows, max_seq_len) float32."""

    tokens: Tokens  # 0 where a token is rejected
    weights: jax.Array  # of the tokens, from `normalization.py`; 0 where a token is rejected
    current: jax.Array  # logprobs under the model in training, without a gradient
    policy: jax.Array  # logprobs under the policy that sampled
    mask: jax.Array  # 1 where the policy's own sample trains, rejected or not
    correction: TokenCorrection
    components: Components | None


class Objective(NamedTuple):
    """The objective of a run file, for batches that are processed in so many micro-batches."""

    config: Learner
    loss: Loss
    divergence: Divergence | None  # from the reference
    micro_batches: int = 1

    def __call__(
        self, model: Any, inputs: tuple[RlExample, NamedArray], *, key: Any = None
    ) -> tuple[jax.Array, Metrics]:
        """Scalar loss of one micro-batch, and metrics. `inputs`: the example and the weights of its
        tokens. Their arrays are named, as the trainer shards by the names of axes.

        The trainer averages over the micro-batches. The sum is wanted, because the weights are
        those of the whole batch, so the loss is multiplied by the number of micro-batches.
        """
        example, weights = unnamed(inputs)
        predicted = predict(model, example, self.config.logprob_chunk)
        loss, metrics = self.from_predictions(predicted, example, weights)
        return loss * self.micro_batches, metrics

    def from_predictions(
        self, predicted: Predictions, example: RlExample, weights: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """The loss and the metrics, given the model's predictions. `weights`: (rows, max_seq_len)
        float32, from `normalization.py`. The loss is the sum over the tokens, so its value adds up
        over the micro-batches.
        """
        inputs = self._term_inputs(predicted, example, weights)
        metrics = to_metrics({"entropy": predicted.entropy}, {}, inputs.mask)
        kl_loss: jax.Array | float = 0.0
        if self.config.kl and self.divergence:
            inputs, kl_loss, measured = kl_term(
                self.config.kl, self.divergence, inputs, example.reference_logprobs
            )
            metrics |= measured
        policy_loss, measured = self._policy_gradient_term(inputs)
        metrics |= measured
        loss = policy_loss + kl_loss
        if inputs.components is None:
            return loss, metrics
        cross_entropy_loss, measured = _cross_entropy_term(predicted, inputs.components, weights)
        metrics |= measured
        loss += cross_entropy_loss
        if example.teacher_logprobs is not None:
            teacher_loss, measured = teacher_term(
                inputs, inputs.components.teacher_kl, example.teacher_logprobs
            )
            metrics |= measured
            loss += teacher_loss
        return loss, metrics

    def _term_inputs(
        self, predicted: Predictions, example: RlExample, weights: jax.Array
    ) -> TermInputs:
        components = components_of(example)
        mask = sampled_mask(jnp.asarray(example.loss_mask), components)
        segment_ids = jnp.asarray(example.segment_ids)
        policy = jnp.asarray(example.policy_logprobs)
        if components is not None:
            policy = jnp.where(mask > 0, policy, 0.0)
        # There is one step a batch, so it begins with the old policy.
        current = jax.lax.stop_gradient(jnp.where(mask > 0, predicted.logprobs, 0.0))
        settings = self.config.correction
        correction = correct(settings, current - policy, mask, segment_ids)
        old = current if settings.old_policy == "decoupled" else policy
        tokens = Tokens(
            current=correction.where_kept(predicted.logprobs),
            old=correction.where_kept(old),
            advantages=jnp.asarray(example.advantages),
            mask=correction.kept,
            segment_ids=segment_ids,
        )
        kept_weights = correction.where_kept(weights)
        return TermInputs(tokens, kept_weights, current, policy, mask, correction, components)

    def _policy_gradient_term(self, inputs: TermInputs) -> tuple[jax.Array, Metrics]:
        tokens, weights, current, policy, mask, correction, components = inputs
        clip = clip_range(self.config)
        losses = correction.weights * self.loss(tokens, clip)
        if components is not None:
            losses = losses * components.policy_gradient
        loss = weighted_sum(losses, weights)
        ratios = ratio(jax.lax.stop_gradient(tokens.current), tokens.old)
        means = {
            "ratio_mean": ratio(current, policy),
            "clip_fraction": (ratios != clip_ratio(ratios, clip)).astype(jnp.float32),
            "mismatch_kl": k3(policy, current),
            "rejected_frac": 1 - correction.kept,
        }
        sums = weight_sums(
            self.config.correction, current - policy, correction, mask, tokens.segment_ids
        )
        named_sums = dict(zip(WEIGHT_SUMS, sums, strict=True))
        metrics = to_metrics(means, {"policy_loss": loss, **named_sums}, mask)
        return loss, {**metrics, "ratio_max": max_metric(means["ratio_mean"], mask)}


def kl_term(
    settings: Kl, estimator: Divergence, inputs: TermInputs, reference: np.ndarray
) -> tuple[TermInputs, jax.Array | float, Metrics]:
    """The inputs, the loss and the metrics of the divergence from the reference. If it is applied
    to the advantages, the loss is 0, and the returned inputs have advantages that are lowered by
    it.
    """
    tokens = inputs.tokens
    divergence = _divergence(estimator, inputs, reference)
    means = {"kl": estimator(inputs.current, jnp.asarray(reference))}
    if settings.applied_to == "advantages":
        advantages = penalize_advantages(tokens, divergence, settings.coefficient)
        lowered = inputs._replace(tokens=tokens._replace(advantages=advantages))
        return lowered, 0.0, to_metrics(means, {}, inputs.mask)
    weighted = inputs.correction.weights * divergence
    loss = settings.coefficient * weighted_sum(weighted, inputs.weights)
    return inputs, loss, to_metrics(means, {"kl_loss": loss}, inputs.mask)


def teacher_term(
    inputs: TermInputs, distilled: jax.Array, teacher: np.ndarray
) -> tuple[jax.Array, Metrics]:
    """The loss and the metrics of the divergence from the teacher, by k2: its gradient is that of
    KL(policy || teacher). `distilled`: how much it counts at each token.
    """
    logprobs = jnp.where(distilled > 0, jnp.asarray(teacher), 0.0)
    divergence = _divergence(k2, inputs, logprobs)
    loss = weighted_sum(inputs.correction.weights * divergence * distilled, inputs.weights)
    means = {"teacher_kl": k2(inputs.current, logprobs)}
    return loss, to_metrics(means, {}, (distilled > 0).astype(jnp.float32))


def _cross_entropy_term(
    predicted: Predictions, components: Components, weights: jax.Array
) -> tuple[jax.Array, Metrics]:
    """`weights`: of all tokens, because the correction rejects none of what is imitated."""
    taught = components.cross_entropy
    surprise = jnp.where(taught > 0, cross_entropy(predicted.logprobs), 0.0)
    loss = weighted_sum(surprise * taught, weights)
    return loss, to_metrics({"cross_entropy": surprise}, {}, (taught > 0).astype(jnp.float32))


def _divergence(divergence: Divergence, inputs: TermInputs, reference: Any) -> jax.Array:
    """The divergence of the tokens from another model, with a gradient; 0 where rejected."""
    where_kept = inputs.correction.where_kept
    return where_kept(divergence(inputs.tokens.current, where_kept(jnp.asarray(reference))))


def to_metrics(means: dict[str, jax.Array], sums: dict[str, jax.Array], mask: jax.Array) -> Metrics:
    """Metrics of all micro-batches: means of (rows, max_seq_len) float32 values over the tokens in
    `mask`, and sums of scalars.
    """
    averaged = {
        name: Metric(jnp.sum(jnp.where(mask > 0, values, 0.0)), jnp.sum(mask), ReductionType.MEAN)
        for name, values in means.items()
    }
    return {
        **averaged,
        **{name: Metric.from_value(value, ReductionType.SUM) for name, value in sums.items()},
    }


def max_metric(values: jax.Array, mask: jax.Array) -> Metric:
    """The maximum over the sampled tokens of all micro-batches."""
    return Metric.from_value(jnp.max(jnp.where(mask > 0, values, 0.0)), ReductionType.MAX)


def make_objective(config: Learner, micro_batches: int = 1) -> Objective:
    """The objective of the settings. Raises ConfigError for an unknown loss or divergence."""
    return Objective(
        config,
        loss_named(config.loss),
        divergence_named(config.kl.estimator) if config.kl else None,
        micro_batches,
    )


def clip_range(config: Learner) -> Clip:
    return Clip(
        low=config.clip_epsilon,
        high=config.clip_epsilon_high or config.clip_epsilon,
        ratio_max=config.clip_ratio_max or math.inf,
    )


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(values * weights), a scalar. A value whose weight is 0 is ignored, even if it is not
    finite.
    """
    return jnp.sum(jnp.where(weights > 0, values, 0.0) * weights)


def penalize_advantages(tokens: Tokens, divergence: jax.Array, coefficient: float) -> jax.Array:
    """A_t - coefficient * sum_{s >= t} KL_s: each token pays for the divergence that it and the
    tokens after it cause. Returns (rows, max_seq_len) float32.

    REINFORCE++, arXiv:2501.03262. No gradient flows through it.
    """
    cost = segments.suffix_sum(jax.lax.stop_gradient(divergence) * tokens.mask, tokens.segment_ids)
    return (tokens.advantages - coefficient * cost) * tokens.mask


def to_run_metrics(measured: dict[str, float]) -> dict[str, float]:
    """The measurements of all micro-batches, under the names of the run's metrics."""
    internal = (*WEIGHT_SUMS, "kl_loss")
    number, weights, squares, untruncated = (measured[name] for name in WEIGHT_SUMS)
    return {
        **{name: value for name, value in measured.items() if name not in internal},
        "effective_sample_size": effective_sample_size(number, weights, squares),
        "weight_mean": mean_weight(number, weights),
        "untruncated_weight_mean": mean_weight(number, untruncated),
    }
