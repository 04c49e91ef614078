"""A policy small enough to enumerate: two tokens of three, nine answers. Rollouts of another
policy, corrected, give the gradient of this one.

The on-policy gradient is the exact sum over all answers. Of the stale rollouts, batches of equal
size give the standard error.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl.config.sections.learner import Learner
from streamrl.learner.loss.objective import make_objective
from streamrl.learner.model.examples import RlExample
from tests.learner.loss.test_objective import IDS, average, predictions

START = 0
LETTERS = (1, 2, 3)
LENGTH = 2
ANSWERS = list(product(LETTERS, repeat=LENGTH))
REWARDS = np.random.default_rng(1).normal(0, 1, len(ANSWERS)).astype(np.float32)
BATCHES = 60
ROLLOUTS = 2000
RNG = np.random.default_rng(2)
# logits of the next token, given the one before; only the letters can come
CURRENT = np.full((IDS, IDS), -1e9, np.float32)
CURRENT[:4, 1:4] = RNG.normal(0, 0.7, (4, 3))
STALE = CURRENT.copy()
STALE[:4, 1:4] += RNG.normal(0, 0.5, (4, 3))  # many updates ago


def rollouts() -> RlExample:
    """The nine answers, one to a row, with the stale policy's logprobs."""
    shape = (len(ANSWERS), LENGTH + 1)
    mask = np.tile(np.array([1, 1, 0], np.float32), (len(ANSWERS), 1))
    made = RlExample(
        input_ids=np.array([(START, *answer) for answer in ANSWERS], np.int32),
        loss_mask=mask,
        segment_ids=np.ones(shape, np.int32),
        position_ids=np.tile(np.arange(LENGTH + 1, dtype=np.int32), (len(ANSWERS), 1)),
        advantages=REWARDS[:, None] * mask,
        policy_logprobs=np.zeros(shape, np.float32),
        reference_logprobs=np.zeros(shape, np.float32),
        temperatures=np.ones(shape, np.float32),
    )
    return made._replace(policy_logprobs=np.asarray(predictions(STALE, made).logprobs) * mask)


def probabilities(table: Any) -> Any:
    """Of the nine answers."""
    log_softmax = jax.nn.log_softmax(jnp.asarray(table))
    return jnp.exp(jnp.stack([log_softmax[START, a] + log_softmax[a, b] for a, b in ANSWERS]))


EACH = rollouts()
BY_STALE = np.asarray(probabilities(STALE), np.float64)
# what the stale policy happened to say
SAMPLED = np.random.default_rng(3).choice(
    len(ANSWERS), (BATCHES, ROLLOUTS), p=BY_STALE / BY_STALE.sum()
)


def on_policy() -> np.ndarray:
    """-d E[reward] / d table, exactly; the loss is averaged over the tokens of a rollout, too."""
    return np.asarray(
        jax.grad(lambda table: -jnp.dot(probabilities(table), REWARDS) / LENGTH)(
            jnp.asarray(CURRENT)
        )
    )[:4, 1:4]


def distances(settings: dict[str, Any]) -> np.ndarray:
    """By how many standard errors each logit's mean gradient over the batches differs from the
    on-policy one.
    """
    learner = Learner.model_validate({"kl": None, **settings})
    made = make_objective(learner)
    gradient = jax.jit(
        jax.grad(
            lambda table, taken, weights: made.from_predictions(
                predictions(table, taken), taken, weights
            )[0]
        )
    )
    found: list[np.ndarray] = []
    for sampled in SAMPLED:
        taken = jax.tree.map(lambda array, sampled=sampled: array[sampled], EACH)
        found.append(
            np.asarray(gradient(CURRENT, taken, average(learner, taken)), np.float64)[:4, 1:4]
        )
    error = np.std(found, axis=0, ddof=1) / np.sqrt(BATCHES)
    return np.abs(np.mean(found, axis=0) - on_policy()) / error


WEIGHTED = {"weights": {"by": "sequence", "limits": [0, 1e6]}}
MASKED = {"weights": {"by": "sequence", "limits": [0, 1e6], "beyond": "mask"}}


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "ppo", "correction": {"old_policy": "decoupled", **WEIGHTED}},
        {
            "loss": "clipped-ratio",
            "correction": {"old_policy": "decoupled", **MASKED},
        },
        {"loss": "grpo", "correction": WEIGHTED},
        {
            "loss": "cispo",
            "correction": {
                "old_policy": "decoupled",
                **WEIGHTED,
                "reject": {"distance": "geometric", "above": 1e6},
            },
        },
    ],
    ids=lambda settings: settings["loss"],
)
def test_corrected_it_is_the_on_policy_gradient(settings: dict[str, Any]):
    found = distances(settings)
    print(f"{settings}: at most {found.max():.2f} standard errors")
    assert found.max() <= 3


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "grpo"},
        {"loss": "ppo", "correction": {"old_policy": "decoupled"}},
        {"loss": "grpo", "correction": {"reject": {"distance": "k3", "above": 0.02}}},
    ],
    ids=["grpo", "ppo", "rejection alone"],
)
def test_uncorrected_it_is_far_from_it(settings: dict[str, Any]):
    found = distances(settings)
    print(f"{settings}: up to {found.max():.1f} standard errors")
    assert found.max() > 10


def test_what_is_cheaper_than_whole_weights_is_biased():
    """Token weights leave out the other tokens of the rollout; a low limit leaves out what the old
    policy seldom said.
    """
    for correction in (
        {"weights": {"by": "token", "limits": [0, 1e6]}},
        {"weights": {"by": "sequence", "limits": [0, 1.0]}},
    ):
        found = distances({"loss": "grpo", "correction": correction})
        print(f"{correction}: up to {found.max():.1f} standard errors")
        assert found.max() > 3
