"""Per-token losses. Each is a pure function of the tokens of some rows. None of them normalizes:
`normalization.py` alone decides how much a token counts.

Notation: ratio = exp(current - old), and the clip range is 1 - low to 1 + high. A loss is
minimized, so tokens with a positive advantage have a negative loss. docs/losses.md compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamrl.config.choices import DIVERGENCES, LOSSES
from streamrl.config.plugins import import_choice
from streamrl.learner.loss import segments

# nats: log ratios are cut to it; exp of it is finite, and so are its square and its product with an
# advantage
MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """The tokens of some rows. All arrays are (rows, max_seq_len) float32 and 0 outside the mask,
    except `segment_ids`.
    """

    current: jax.Array  # logprobs under the model in training
    old: jax.Array  # logprobs under the policy that the ratio is measured from
    advantages: jax.Array
    mask: jax.Array  # 1 where the token trains
    segment_ids: jax.Array  # int32: of the rollout in its row; 0 where padded


class Clip(NamedTuple):
    """How far the ratio may go from 1."""

    low: float
    high: float
    ratio_max: float = math.inf  # largest ratio of a token with a negative advantage


Loss = Callable[[Tokens, Clip], jax.Array]  # (rows, max_seq_len) float32
Divergence = Callable[[jax.Array, jax.Array], jax.Array]


def ratio(current: jax.Array, old: jax.Array) -> jax.Array:
    """exp(current - old), with the difference limited to +-MAX_LOG_RATIO: (...) float32. Beyond the
    limit the gradient is 0.
    """
    return jnp.exp(jnp.clip(current - old, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clip_ratio(ratios: jax.Array, clip: Clip) -> jax.Array:
    """clip(ratio, 1 - low, 1 + high): (...) float32."""
    return jnp.clip(ratios, 1 - clip.low, 1 + clip.high)


def clipped_ratio(tokens: Tokens, clip: Clip) -> jax.Array:
    """-clip(ratio) * A: the loss of docs/design/logprobs.md. Outside the clip range its gradient is
    0, whatever the sign of A.
    """
    return -clip_ratio(ratio(tokens.current, tokens.old), clip) * tokens.advantages


def grpo(tokens: Tokens, clip: Clip) -> jax.Array:
    """-A * current: the policy gradient. docs/design/grpo.md; GRPO, arXiv:2402.03300, equation 19
    with old equal to current, and gradient 20.

    It contains no ratio: rollouts of another policy need importance weights (`corrections.py`).
    """
    return -tokens.advantages * tokens.current


def ppo(tokens: Tokens, clip: Clip) -> jax.Array:
    """-min(ratio * A, clip(ratio) * A). PPO, arXiv:1707.06347, equation 7. With high > low
    unlikely tokens may become likely: DAPO, arXiv:2503.14476, section 3.1, has 0.2 and 0.28.

    The minimum keeps the gradient where an update has made the objective worse by more than the
    clip range. Where A < 0 it has no lower bound, so one token with a large ratio can outweigh all
    others of a batch. `clip.ratio_max` bounds it: there the ratio is min(ratio, ratio_max), and the
    gradient is 0 above that. Dual-clip PPO, arXiv:1912.09729, equation 5.
    """
    ratios = ratio(tokens.current, tokens.old)
    bounded = jnp.where(tokens.advantages < 0, jnp.minimum(ratios, clip.ratio_max), ratios)
    return -jnp.minimum(bounded * tokens.advantages, clip_ratio(ratios, clip) * tokens.advantages)


def cispo(tokens: Tokens, clip: Clip) -> jax.Array:
    """-stop(min(ratio, 1 + high)) * A * current: the weight is clipped, and every token keeps its
    gradient. MiniMax-M1, arXiv:2506.13585, equation 4.

    As in the paper, the weight has no lower bound.
    """
    weights = jax.lax.stop_gradient(jnp.minimum(ratio(tokens.current, tokens.old), 1 + clip.high))
    return -weights * tokens.advantages * tokens.current


def gspo(tokens: Tokens, clip: Clip) -> jax.Array:
    """PPO with one ratio per rollout, s = exp(mean over its tokens of (current - old)). GSPO,
    arXiv:2507.18071, equations 5 to 7, which use 3e-4 and 4e-4.

    Each token of a rollout has the rollout's loss, so the mean over its tokens is the rollout's
    loss.
    """
    mean = segments.segment_mean(tokens.current - tokens.old, tokens.mask, tokens.segment_ids)
    return ppo(tokens._replace(current=mean, old=jnp.zeros_like(mean)), clip)


def k1(current: jax.Array, reference: jax.Array) -> jax.Array:
    """current - reference: unbiased for KL(current || reference), high variance. The term of
    docs/design/logprobs.md.
    """
    return current - reference


def k2(current: jax.Array, reference: jax.Array) -> jax.Array:
    """(current - reference)^2 / 2: biased, low variance, never negative. Schulman 2020,
    "Approximating KL divergence".
    """
    return jnp.square(current - reference) / 2


def k3(current: jax.Array, reference: jax.Array) -> jax.Array:
    """exp(d) - d - 1 with d = reference - current, cut to +-MAX_LOG_RATIO:
    unbiased, low variance, never negative.

    expm1, because exp(d) - 1 cancels where d is small. Schulman 2020; GRPO, arXiv:2402.03300,
    equation 4.
    """
    d = jnp.clip(reference - current, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


def loss_named(name: str) -> Loss:
    """The shipped loss of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    targets = {shipped: choice.target for shipped, choice in LOSSES.items()}
    return import_choice(name, "learner.loss", targets)


def divergence_named(name: str) -> Divergence:
    """The shipped estimator of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return import_choice(name, "learner.kl.estimator", DIVERGENCES)
