"""The objective on logprobs alone: the model is a table, so that every number can be worked out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl.config.choices import AVERAGE_OF, LOSSES
from streamrl.config.run_file import parse
from streamrl.config.sections.learner import (
    Correction,
    ImportanceWeights,
    Kl,
    Learner,
)
from streamrl.learner.loss.normalization import average_named, segment_numbers
from streamrl.learner.loss.objective import make_objective, to_run_metrics
from streamrl.learner.model.examples import RlExample, empty_example
from streamrl.learner.model.head import Predictions
from tests.learner.examples import Segment, example

IDS = 6
SEGMENTS = [
    Segment([1, 2, 3], 2, 2.0, [-1.0]),
    Segment([1, 4, 5, 3], 1, -1.0, [-1.5, -2.0, -1.2]),
    Segment([2, 2, 5], 1, 0.5, [-0.9, -2.2]),
    Segment([1, 2, 3, 4, 5], 2, -0.7, [-1.0, -1.8, -2.5]),
]
# logits of the next token, given the one before
TABLE = np.random.default_rng(0).normal(0, 0.7, (IDS, IDS)).astype(np.float32)


def predictions(table: Any, taken: RlExample) -> Predictions:
    log_softmax = jax.nn.log_softmax(table[jnp.asarray(taken.input_ids)])
    targets = jnp.roll(jnp.asarray(taken.input_ids), -1, axis=1)
    return Predictions(
        jnp.take_along_axis(log_softmax, targets[..., None], -1)[..., 0],
        -(jnp.exp(log_softmax) * log_softmax).sum(-1),
    )


def of_preset(name: str) -> Learner:
    learner = {"preset": name, "kl": {"coefficient": 0.1}}
    return parse(
        {"run": "r", "envs": {"copy": {}}, "buffer": {"max_age": 0}, "learner": learner}
    ).learner


def average(settings: Learner, taken: RlExample) -> np.ndarray:
    name = settings.average or AVERAGE_OF.get(settings.loss, "tokens")
    return average_named(name, ROW)(taken.loss_mask, segment_numbers(taken.segment_ids))


@cache
def slope(settings: str) -> Callable[[np.ndarray, RlExample, np.ndarray], jax.Array]:
    """Compiled once."""
    made = make_objective(Learner.model_validate_json(settings))
    return jax.jit(
        jax.grad(
            lambda table, taken, weights: made.from_predictions(
                predictions(table, taken), taken, weights
            )[0]
        )
    )


def gradient(settings: Learner, taken: RlExample, weights: np.ndarray) -> np.ndarray:
    """d loss / d table: (IDS, IDS)."""
    return np.asarray(slope(settings.model_dump_json())(TABLE, taken, weights))


def measured(settings: Learner, taken: RlExample) -> dict[str, float]:
    loss, metrics = make_objective(settings).from_predictions(
        predictions(TABLE, taken), taken, jnp.asarray(average(settings, taken))
    )
    return {
        "loss": float(loss),
        **to_run_metrics({name: float(metric) for name, metric in metrics.items()}),
    }


def with_reference(taken: RlExample) -> RlExample:
    return taken._replace(reference_logprobs=(taken.policy_logprobs - 0.3) * taken.loss_mask)


ROW = 8
WHOLE = with_reference(example([[SEGMENTS[0], SEGMENTS[1]], [SEGMENTS[2]], [SEGMENTS[3]], []], ROW))


@pytest.mark.parametrize("advantage", [1.0, -0.5])
def test_the_example_of_the_design_of_logprobs(advantage: float):
    """Seven prompt tokens and one sampled, with the logprobs of docs/design/logprobs.md.

    The ratio is exp(-0.001 + 0.002), the divergence -0.001 + 0.002, and there is one token to
    divide by.
    """
    settings = of_preset("clipped-ratio")
    assert (settings.loss, settings.normalize_advantages) == ("clipped-ratio", False)
    assert settings.kl == Kl(coefficient=0.1, estimator="k1", applied_to="loss")
    taken = example(
        [[Segment([101, 2054, 2003, 1016, 1009, 1016, 1029, 1018], 7, advantage, [-0.002])]], 8
    )
    assert taken.loss_mask.tolist() == [[0, 0, 0, 0, 0, 0, 1, 0]]
    current = jnp.array([[-0.01, -0.05, -0.03, -0.02, -0.04, -0.03, -0.001, 0.0]])
    reference = np.array([[-0.01, -0.04, -0.03, -0.02, -0.03, -0.03, -0.002, 0.0]], np.float32)
    predicted = Predictions(current, jnp.zeros_like(current))
    loss, _ = make_objective(settings).from_predictions(
        predicted,
        taken._replace(reference_logprobs=reference),
        jnp.asarray(average(settings, taken)),
    )
    assert float(loss) == pytest.approx(-np.exp(0.001) * advantage + 0.1 * 0.001, abs=1e-6)


def test_the_gradient_of_the_design_of_grpo_by_hand():
    """Summed per sample over its own length, with k3 in it, divided by the number of samples:
    equation 19 of GRPO, term by term.
    """
    settings = of_preset("grpo-on-policy")
    assert (settings.loss, settings.average, settings.normalize_advantages) == (
        "grpo",
        "samples",
        False,
    )
    assert settings.kl == Kl(coefficient=0.1, estimator="k3", applied_to="loss")

    def loss(table: Any) -> Any:
        total = 0.0
        for s in SEGMENTS:
            sampled = jnp.array(s.tokens[s.prompt :])
            before = jnp.array(s.tokens[s.prompt - 1 : -1])
            current = jax.nn.log_softmax(table[before])[jnp.arange(len(sampled)), sampled]
            d = jnp.array(s.logprobs) - 0.3 - current
            total += jnp.sum(-s.advantage * current + 0.1 * (jnp.exp(d) - d - 1)) / len(sampled)
        return total / len(SEGMENTS)

    expected, slope = jax.jit(jax.value_and_grad(loss))(TABLE)
    np.testing.assert_allclose(
        gradient(settings, WHOLE, average(settings, WHOLE)), slope, atol=1e-6
    )
    assert measured(settings, WHOLE)["loss"] == pytest.approx(float(expected), abs=1e-6)


def split(
    taken: RlExample, weights: np.ndarray, cuts: list[int]
) -> Iterator[tuple[RlExample, np.ndarray]]:
    """The rows between the cuts, with padding for the others."""
    rows = len(weights)
    for start, end in itertools.pairwise([0, *cuts, rows]):
        here = (np.arange(rows) >= start) & (np.arange(rows) < end)
        padding = empty_example(rows, ROW)
        part = jax.tree.map(lambda a, b, here=here: np.where(here[:, None], a, b), taken, padding)
        yield part, weights * here[:, None]


@pytest.mark.parametrize(
    ("loss", "name"), [*((loss, "") for loss in LOSSES), ("ppo", "samples"), ("grpo", "constant")]
)
def test_any_split_adds_up_to_the_gradient_of_the_whole(loss: str, name: str):
    """Parts of one to three rows, and every rollout in a row of its own: the weights are those of
    the whole batch.
    """
    correction = {
        "old_policy": "decoupled",
        "weights": {"by": "sequence", "limits": [0, 1.5]},
        "reject": {"distance": "k3", "above": 1.0},
    }
    settings = Learner.model_validate(
        {
            "loss": loss,
            "average": name,
            "clip_epsilon_high": 0.3,
            "kl": {"coefficient": 0.1},
            "correction": correction,
        }
    )
    weights = average(settings, WHOLE)
    whole = gradient(settings, WHOLE, weights)
    for cuts in ([1], [2], [3], [1, 2], [1, 3], [2, 3], [1, 2, 3]):
        parts = [gradient(settings, taken, part) for taken, part in split(WHOLE, weights, cuts)]
        np.testing.assert_allclose(sum(parts), whole, atol=1e-6)
    alone = with_reference(example([[s] for s in SEGMENTS], ROW))
    np.testing.assert_allclose(
        gradient(settings, alone, average(settings, alone)), whole, atol=1e-6
    )
    assert np.abs(whole).max() > 1e-3


def test_decoupled_measures_the_ratio_from_the_policy_that_the_step_begins_with():
    """It is 1 there: nothing is clipped, and PPO's gradient is the policy gradient's."""
    decoupled = {
        "correction": {"old_policy": "decoupled"},
        "average": "samples",
        "kl": None,
    }
    ppo, grpo = (Learner.model_validate({**decoupled, "loss": loss}) for loss in ("ppo", "grpo"))
    weights = average(ppo, WHOLE)
    np.testing.assert_allclose(
        gradient(ppo, WHOLE, weights), gradient(grpo, WHOLE, weights), atol=1e-6
    )
    assert (
        measured(ppo, WHOLE)["clip_fraction"]
        == 0
        < measured(Learner(kl=None), WHOLE)["clip_fraction"]
    )


def test_what_is_rejected_neither_trains_nor_spoils_the_gradient():
    """One token that the model finds e^200 times likelier than the policy that sampled it."""
    far = WHOLE._replace(policy_logprobs=WHOLE.policy_logprobs.copy())
    far.policy_logprobs[2, 2] = -200.0
    keeping = WHOLE.loss_mask.copy()
    keeping[2, 2] = 0
    settings = Learner.model_validate(
        {"kl": None, "correction": {"reject": {"distance": "k1", "above": 20}}}
    )
    weights = average(settings, far)
    expected = gradient(settings, WHOLE, weights * keeping)
    assert weights[2, 2] > 0 and np.abs(expected).max() > 0
    np.testing.assert_allclose(gradient(settings, far, weights), expected, atol=1e-7)
    assert measured(settings, far)["rejected_frac"] == pytest.approx(1 / 9)


def test_the_mismatch_is_measured_at_the_sampled_tokens():
    found = measured(Learner(kl=None), WHOLE)
    current = np.asarray(predictions(TABLE, WHOLE).logprobs)[WHOLE.loss_mask > 0]
    d = current - WHOLE.policy_logprobs[WHOLE.loss_mask > 0]
    weights = np.exp(d)
    assert found["mismatch_kl"] == pytest.approx((weights - d - 1).mean(), rel=1e-4)
    assert found["effective_sample_size"] == pytest.approx(
        weights.sum() ** 2 / (9 * (weights**2).sum()), rel=1e-4
    )
    kept = measured(
        Learner.model_validate(
            {"kl": {"estimator": "k1"}, "correction": {"reject": {"distance": "k3", "above": 0.1}}}
        ),
        WHOLE,
    )
    assert (
        kept["rejected_frac"] == pytest.approx((weights - d - 1 > 0.1).mean())
        and 0 < kept["rejected_frac"] < 1
    )
    assert kept["kl"] == pytest.approx((d + 0.3).mean(), rel=1e-4)  # measured of all of them
    assert found["rejected_frac"] == 0 and found["ratio_max"] == pytest.approx(
        weights.max(), rel=1e-5
    )


def test_the_divergence_can_be_a_cost_in_the_advantages():
    """REINFORCE++: each token pays for its own k1 and for those behind it, in its rollout; no
    gradient comes from the divergence itself.
    """
    shaped = Learner(loss="grpo", kl=Kl(coefficient=0.1, estimator="k1", applied_to="advantages"))
    plain = Learner(loss="grpo", kl=None)
    current = np.asarray(predictions(TABLE, WHOLE).logprobs)
    advantages = WHOLE.advantages.copy()
    for row, places in ((0, [1]), (0, [3, 4, 5]), (1, [0, 1]), (2, [1, 2, 3])):
        for place in places:
            later = [p for p in places if p >= place]
            advantages[row, place] -= 0.1 * sum(
                current[row, p] - WHOLE.reference_logprobs[row, p] for p in later
            )
    weights = average(plain, WHOLE)
    np.testing.assert_allclose(
        gradient(shaped, WHOLE, weights),
        gradient(plain, WHOLE._replace(advantages=advantages), weights),
        atol=1e-6,
    )
    assert np.abs(gradient(shaped, WHOLE, weights) - gradient(plain, WHOLE, weights)).max() > 1e-3


ACTIONS = 4  # of the policies below, each a table of logits
CURRENT = np.array([1.0, 0.2, -0.5, 0.3], np.float32)
SAMPLED_BY = np.array([-0.5, 1.0, 0.2, 0.1], np.float32)  # an older policy
REFERENCE = np.array([0.1, 0.1, 0.9, -0.4], np.float32)


def expected_gradient(term: str, weights: str) -> np.ndarray:
    """The gradient of one divergence of k2, in expectation over the four actions that the older
    policy takes. Row i takes action i, and has the probability of that as its weight: (4,) float32.

    `term`: reference or teacher, whose divergence counts.
    """
    settings: dict[str, Any] = {
        "loss": "grpo",
        "kl": {"estimator": "k2", "coefficient": 1.0} if term == "reference" else None,
    }
    if weights != "none":
        settings["correction"] = {"weights": {"by": weights, "limits": [0, 100.0]}}
    if term == "teacher":
        settings["teacher"] = "t"
    made = make_objective(Learner.model_validate(settings))

    def column(values: np.ndarray) -> np.ndarray:
        return np.stack([values, np.zeros(ACTIONS)], axis=1).astype(np.float32)

    def log_softmax(logits: np.ndarray) -> np.ndarray:
        return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))

    mask = column(np.ones(ACTIONS))
    taken = empty_example(ACTIONS, 2)._replace(
        loss_mask=mask,
        segment_ids=mask.astype(np.int32),
        policy_logprobs=column(log_softmax(SAMPLED_BY)),
        reference_logprobs=column(log_softmax(REFERENCE)),
    )
    if term == "teacher":
        taken = taken._replace(
            policy_gradient_weights=np.zeros_like(mask),
            teacher_kl_weights=mask,
            teacher_logprobs=taken.reference_logprobs,
        )
    probabilities = jnp.asarray(column(np.exp(log_softmax(SAMPLED_BY))))

    def loss(logits: Any) -> Any:
        logprobs = jnp.zeros((ACTIONS, 2)).at[:, 0].set(jax.nn.log_softmax(logits))
        predicted = Predictions(logprobs, jnp.zeros((ACTIONS, 2)))
        return made.from_predictions(predicted, taken, probabilities)[0]

    return np.asarray(jax.grad(loss)(jnp.asarray(CURRENT)))


@pytest.mark.parametrize("term", ["reference", "teacher"])
@pytest.mark.parametrize("weights", ["token", "sequence"])
def test_with_importance_weights_the_gradient_of_k2_is_that_of_the_divergence_off_policy(
    term: str, weights: str
):
    """d KL(c || q) / d logit_i = c_i (log c_i - log q_i - KL(c || q)), at c, not at the older
    policy that sampled.
    """
    c = np.exp(CURRENT) / np.exp(CURRENT).sum()
    q = np.exp(REFERENCE) / np.exp(REFERENCE).sum()
    distance = np.log(c) - np.log(q)
    right = c * (distance - (c * distance).sum())
    np.testing.assert_allclose(expected_gradient(term, weights), right, atol=1e-5)
    assert np.abs(expected_gradient(term, "none") - right).max() > 0.05


def test_the_divergence_in_the_advantages_is_subtracted_after_the_baseline():
    """A group of four answers of one token, rewards 1 0 1 0, leave-one-out advantages 2/3 -2/3 2/3
    -2/3, divergences .5 .1 .2 .4, coefficient .1: the baseline has no part in the divergence.
    """
    settings = Learner(loss="grpo", kl=Kl(coefficient=0.1, estimator="k1", applied_to="advantages"))
    ones = np.ones((4, 1), np.float32)
    divergences = np.array([[0.5], [0.1], [0.2], [0.4]], np.float32)
    advantages = np.array([[2], [-2], [2], [-2]], np.float32) / 3
    taken = empty_example(4, 1)._replace(
        loss_mask=ones,
        segment_ids=ones.astype(np.int32),
        advantages=advantages,
        reference_logprobs=-ones - divergences,
        policy_logprobs=-ones,
    )

    def loss(current: Any) -> Any:
        predicted = Predictions(current, jnp.zeros((4, 1)))
        return make_objective(settings).from_predictions(predicted, taken, jnp.asarray(ones))[0]

    slopes = np.asarray(jax.grad(loss)(jnp.asarray(-ones)))
    np.testing.assert_allclose(-slopes[:, 0], [0.6167, -0.6767, 0.6467, -0.7067], atol=1e-4)


def test_sequence_weights_that_vanish_are_measured():
    """8,000 tokens, each 0.3 % less likely to the model than to the server: the weight of the
    rollout is e^-24, of which the cut of 20 nats leaves e^-20 = 2e-9, and the effective sample size
    is 1 all the same.
    """
    tokens = 8_000
    ones = np.ones((2, tokens), np.float32)
    taken = empty_example(2, tokens)._replace(
        loss_mask=ones,
        segment_ids=ones.astype(np.int32),
        advantages=ones * [[1], [-1]],
        policy_logprobs=-ones + np.float32(0.003),
    )
    weighted = Correction(weights=ImportanceWeights(by="sequence"))
    settings = Learner(loss="grpo", kl=None, correction=weighted)
    _, found = make_objective(settings).from_predictions(
        Predictions(jnp.asarray(-ones), jnp.asarray(ones)), taken, jnp.asarray(ones) / (2 * tokens)
    )
    metrics = to_run_metrics({name: float(metric) for name, metric in found.items()})
    assert metrics["effective_sample_size"] == pytest.approx(1)
    assert metrics["weight_mean"] == pytest.approx(np.exp(-20), rel=1e-3)
    assert metrics["untruncated_weight_mean"] == pytest.approx(np.exp(-20), rel=1e-3)
