"""What is minimised: the losses of the sampled tokens, corrected, with the divergence from the reference, each counting what its average says.

Pure in logprobs, so that it can be checked on a policy that is a table. Every number here adds up over the parts of a batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.metrics import Metric, ReductionType

from streamrl.batcher.packing import RlExample
from streamrl.config import Learner
from streamrl.learner import segments
from streamrl.learner.corrections import correct, effective_sample_size, sample_sums
from streamrl.learner.losses import Clip, Divergence, Loss, Tokens, bounded, divergence_named, k3, loss_named, ratio
from streamrl.learner.model import Predictions, predict

Metrics = dict[str, Metric]
SUMS = ("weights_number", "weights_sum", "weights_squares")  # what the effective sample size is made of


class Objective(NamedTuple):
    """The loss of the run file, for batches that are worked on in `parts` parts."""

    config: Learner
    loss: Loss
    divergence: Divergence
    parts: int = 1

    def __call__(self, model: Any, arrays: tuple[NamedArray, ...], *, key: Any = None) -> tuple[jax.Array, Metrics]:
        """Scalar loss of one part, and metrics. `arrays`: the fields of an RlExample and the tokens' weights, named, for the trainer shards by the
        names of axes.

        The trainer averages over the parts; the weights are the whole batch's already, so that their sum is wanted: each part counts `parts` times.
        """
        *fields, weights = (cast(Any, array.array) for array in arrays)
        example = RlExample(*fields)
        loss, metrics = self.of(predict(model, example), example, weights)
        return loss * self.parts, metrics

    def of(self, predicted: Predictions, example: RlExample, weights: jax.Array) -> tuple[jax.Array, Metrics]:
        """The same of logprobs: the sum over the tokens, weighted. `weights`: (rows, max_seq_len) float32, of `averages.py`."""
        c, mask, segment_ids = self.config, jnp.asarray(example.loss_mask), jnp.asarray(example.segment_ids)
        policy, advantages = jnp.asarray(example.policy_logprobs), jnp.asarray(example.advantages)
        known = jax.lax.stop_gradient(jnp.where(mask > 0, predicted.logprobs, 0.0))  # one step a batch: it begins with the old policy
        corrected = correct(c.correction, known - policy, mask, segment_ids)
        kept = corrected.kept
        current, old = (
            jnp.where(kept > 0, logprobs, 0.0)  # or the gradient of what is rejected, be it infinite, comes back as 0 * inf
            for logprobs in (predicted.logprobs, known if c.correction.old_policy == "decoupled" else policy)
        )
        weights *= kept

        tokens = Tokens(current, old, advantages, kept, segment_ids)
        means = {"entropy": predicted.entropy, "ratio_mean": ratio(known, policy), "mismatch_kl": k3(policy, known), "rejected": 1 - kept}
        sums = dict[str, jax.Array]()
        if c.kl_coefficient > 0:  # otherwise nobody has asked the reference
            divergence = means["kl"] = self.divergence(current, jnp.asarray(example.reference_logprobs))
            if c.kl_in == "advantages":
                tokens = tokens._replace(advantages=shaped(tokens, divergence, c.kl_coefficient))
            else:
                sums["kl_loss"] = c.kl_coefficient * weighed(divergence, weights)
        clip = clip_of(c)
        ratios = ratio(jax.lax.stop_gradient(current), old)
        means["clip_fraction"] = (ratios != bounded(ratios, clip)).astype(jnp.float32)
        sums["policy_loss"] = weighed(corrected.weights * self.loss(tokens, clip), weights)

        metrics = {name: Metric(jnp.sum(jnp.where(mask > 0, values, 0.0)), jnp.sum(mask), ReductionType.MEAN) for name, values in means.items()}
        counted = dict(zip(SUMS, sample_sums(c.correction, known - policy, corrected, mask, segment_ids), strict=True))
        metrics |= {name: Metric.from_value(value, ReductionType.SUM) for name, value in {**sums, **counted}.items()}
        metrics["ratio_max"] = Metric.from_value(jnp.max(jnp.where(mask > 0, ratio(known, policy), 0.0)), ReductionType.MAX)
        return jnp.sum(jnp.stack(list(sums.values()))), metrics


def objective(config: Learner, parts: int = 1) -> Objective:
    """Raises ConfigError for a loss or an estimator that nobody knows."""
    return Objective(config, loss_named(config.loss), divergence_named(config.kl), parts)


def clip_of(config: Learner) -> Clip:
    return Clip(config.clip_epsilon, config.clip_epsilon_high or config.clip_epsilon)


def weighed(values: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(values * weights): a scalar. What counts nothing cannot spoil it, whatever it is."""
    return jnp.sum(jnp.where(weights > 0, values, 0.0) * weights)


def shaped(tokens: Tokens, divergence: jax.Array, coefficient: float) -> jax.Array:
    """A_t - coefficient * sum_{s >= t} KL_s: the divergence as a cost that each token causes, now and later. Returns (rows, max_seq_len) float32.

    REINFORCE++, arXiv:2501.03262. No gradient flows through it.
    """
    cost = segments.still_to_come(jax.lax.stop_gradient(divergence) * tokens.mask, tokens.segment_ids)
    return (tokens.advantages - coefficient * cost) * tokens.mask


def summed_up(measured: dict[str, float]) -> dict[str, float]:
    """What was measured of all parts, in the words of the run's metrics."""
    kept = {name: value for name, value in measured.items() if name not in (*SUMS, "kl_loss", "rejected")}
    return {**kept, "effective_sample_size": effective_sample_size(*(measured[name] for name in SUMS)), "rejected_frac": measured["rejected"]}
