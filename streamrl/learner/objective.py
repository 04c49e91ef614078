"""The objective: the weighted sum of the tokens' losses, with off-policy corrections and the
divergence from the reference.

It is a pure function of logprobs, so tests can check it on a policy that is a table. Every number
here adds up over the micro-batches of a batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.metrics import Metric, ReductionType

from streamrl.config.sections.learner import Learner
from streamrl.learner import segments
from streamrl.learner.components import components_of, cross_entropy, sampled_mask
from streamrl.learner.corrections import correct, effective_sample_size, weight_sums
from streamrl.learner.examples import RlExample
from streamrl.learner.head import Predictions
from streamrl.learner.losses import (
    Clip,
    Divergence,
    Loss,
    Tokens,
    clip_ratio,
    divergence_named,
    k3,
    loss_named,
    ratio,
)
from streamrl.learner.model import predict, unnamed

Metrics = dict[str, Metric]
# what the effective sample size is made of
SUMS = ("weights_number", "weights_sum", "weights_squares")


class Objective(NamedTuple):
    """The objective of a run file, for batches that are processed in so many micro-batches."""

    config: Learner
    loss: Loss
    divergence: Divergence
    teacher_divergence: Divergence
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
        c = self.config
        whole = jnp.asarray(example.loss_mask)
        components = components_of(example)
        mask = sampled_mask(whole, components)
        segment_ids = jnp.asarray(example.segment_ids)
        policy = jnp.asarray(example.policy_logprobs)
        reference = jnp.asarray(example.reference_logprobs)
        if components is not None:
            policy = jnp.where(mask > 0, policy, 0.0)
        # one step a batch: it begins with the old policy
        known = jax.lax.stop_gradient(jnp.where(mask > 0, predicted.logprobs, 0.0))
        corrected = correct(c.correction, known - policy, mask, segment_ids)

        def kept(values: jax.Array) -> jax.Array:
            # or the gradient of what is rejected, be it infinite, comes back as 0 * inf
            return jnp.where(corrected.kept > 0, values, 0.0)

        old = kept(known if c.correction.old_policy == "decoupled" else policy)
        tokens = Tokens(
            current=kept(predicted.logprobs),
            old=old,
            advantages=jnp.asarray(example.advantages),
            mask=corrected.kept,
            segment_ids=segment_ids,
        )
        all_weights = weights
        weights = kept(weights)
        sums = dict[str, jax.Array]()
        if c.uses_reference:  # otherwise nobody has asked the reference
            divergence = kept(self.divergence(tokens.current, kept(reference)))
            if c.kl_in == "advantages":
                tokens = tokens._replace(
                    advantages=penalize_advantages(tokens, divergence, c.kl_coefficient)
                )
            else:
                sums["kl_loss"] = c.kl_coefficient * weighted_sum(divergence, weights)
        policy_loss = corrected.weights * self.loss(tokens, clip_range(c))
        if components is not None:
            policy_loss = policy_loss * components.policy_gradient
        sums["policy_loss"] = weighted_sum(policy_loss, weights)

        ratios = ratio(jax.lax.stop_gradient(tokens.current), old)
        means = {
            "entropy": predicted.entropy,
            "ratio_mean": ratio(known, policy),
            "clip_fraction": (ratios != clip_ratio(ratios, clip_range(c))).astype(jnp.float32),
            "mismatch_kl": k3(policy, known),
            "rejected_frac": 1 - corrected.kept,
            **({"kl": self.divergence(known, reference)} if c.uses_reference else {}),
        }
        sums |= dict(
            zip(
                SUMS,
                weight_sums(c.correction, known - policy, corrected, mask, segment_ids),
                strict=True,
            )
        )
        metrics = to_metrics(means, sums, mask)
        loss = sums["policy_loss"] + sums.get("kl_loss", 0.0)
        if components is not None:
            taught = components.cross_entropy
            surprise = jnp.where(taught > 0, cross_entropy(predicted.logprobs), 0.0)
            loss += weighted_sum(surprise * taught, all_weights)
            metrics |= to_metrics({"cross_entropy": surprise}, {}, (taught > 0).astype(jnp.float32))
        if components is not None and example.teacher_logprobs is not None:
            distilled = components.teacher_kl
            teacher = jnp.where(distilled > 0, jnp.asarray(example.teacher_logprobs), 0.0)
            distance = kept(self.teacher_divergence(tokens.current, kept(teacher)))
            loss += weighted_sum(corrected.weights * distance * distilled, weights)
            metrics |= to_metrics(
                {"teacher_kl": self.teacher_divergence(known, teacher)},
                {},
                (distilled > 0).astype(jnp.float32),
            )
        return loss, {
            **metrics,
            "ratio_max": max_metric(means["ratio_mean"], mask),
        }


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
        divergence_named(config.kl),
        divergence_named(config.teacher.kl),
        micro_batches,
    )


def clip_range(config: Learner) -> Clip:
    return Clip(config.clip_epsilon, config.clip_epsilon_high or config.clip_epsilon)


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
    kept = {name: value for name, value in measured.items() if name not in (*SUMS, "kl_loss")}
    return {
        **kept,
        "effective_sample_size": effective_sample_size(*(measured[name] for name in SUMS)),
    }
