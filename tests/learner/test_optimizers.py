"""Optimizers on a model of one matrix, without a trainer: the first steps of each."""

from __future__ import annotations

from typing import Any, get_args

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
import optax
import pytest
from haliax.nn import Linear
from levanter.tracker import NoopTracker

from streamrl.config.sections.learner import Learner, Schedule
from streamrl.learner.optimizers import (
    OPTIMIZERS,
    make_optimizer,
    skip_not_finite,
)

IN = hax.Axis("in", 3)
OUT = hax.Axis("out", 2)
GOAL = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]], np.float32)


def a_model() -> Linear:
    weight = hax.named(jnp.zeros((2, 3), jnp.float32), (OUT, IN))
    return Linear(weight=weight, bias=None, In=IN, Out=OUT)


def loss(model: Linear) -> jax.Array:
    return jnp.square(model.weight.array - GOAL).sum()


def trained(config: Learner, steps: int, spoil: bool = False) -> tuple[Any, Any]:
    """The model after some steps down the slope of `loss`, and the state of the optimizer.

    `spoil`: the last gradient is not finite.
    """
    optimizer = make_optimizer(config)
    model: Any = a_model()
    with levanter.tracker.current_tracker(NoopTracker()):
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        for number in range(steps):
            value, slope = eqx.filter_value_and_grad(loss)(model)
            if spoil and number == steps - 1:
                slope = jax.tree.map(lambda leaf: leaf * jnp.nan, slope)
            changes, state = optimizer.update(slope, state, model, loss=value)
            model = eqx.apply_updates(model, changes)
    return model, state


def settings(**others: Any) -> Learner:
    return Learner.model_validate(
        {"learning_rate": 0.1, "warmup_steps": 0, "weight_decay": 0.01, **others}
    )


def bits(tree: object) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_the_names_are_those_of_the_run_file():
    assert tuple(OPTIMIZERS) == get_args(Learner.model_fields["optimizer"].annotation)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_down_the_slope(name: str):
    model, state = trained(settings(optimizer=name), 5)
    assert float(loss(model)) < float(loss(a_model()))
    # The gradient of the last step, before any clipping: twice the distance to the goal.
    before, _ = trained(settings(optimizer=name), 4)
    assert float(state[0].norm) == pytest.approx(
        2 * float(np.linalg.norm(before.weight.array - GOAL)), rel=1e-5
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_the_schedule(name: str):
    """In the third step of two the rate is 0, so nothing moves any more."""
    falling = {"schedule": Schedule(kind="linear", steps=2), "optimizer": name}
    two, _ = trained(settings(**falling), 2)
    three, _ = trained(settings(**falling), 3)
    assert np.abs(two.weight.array).max() > 1e-3
    np.testing.assert_array_equal(two.weight.array, three.weight.array)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_no_optimizer(name: str):
    before, kept = trained(settings(optimizer=name), 2)
    after, state = trained(settings(optimizer=name), 3, spoil=True)
    assert bits(after) == bits(before)
    assert bits(state[1:]) == bits(kept[1:])


def test_adamw_is_that_of_runs_before_there_was_a_choice():
    """Bit for bit, in the same places of the state, as checkpoints have it."""
    config = settings(warmup_steps=10)
    rate = optax.linear_schedule(0.1 / 10, 0.1, 10)
    before = skip_not_finite(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.01),
        ),
        rate,
    )
    model: Any = a_model()
    state: Any = before.init(model)
    for _ in range(3):
        value, slope = eqx.filter_value_and_grad(loss)(model)
        changes, state = before.update(slope, state, model, loss=value)
        model = eqx.apply_updates(model, changes)
    now, changed = trained(config, 3)
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    assert bits((now, changed)) == bits((model, state))


def test_adamw_writes_its_moments_in_their_place():
    """The compiled update has temporary memory for the changes, and for no copy of a moment."""
    optimizer = make_optimizer(settings())
    parameters = {name: jnp.zeros((512, 512)) for name in "abc"}

    def step(parameters: Any, state: Any, gradient: Any) -> Any:
        changes, state = optimizer.update(gradient, state, parameters, loss=0.0)
        return optax.apply_updates(parameters, changes), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    made: Any = compiled.lower(parameters, optimizer.init(parameters), parameters).compile()
    held = made.memory_analysis().temp_size_in_bytes
    assert held < 1.1 * sum(array.nbytes for array in parameters.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_learning_rate_of_the_last_step_is_recorded_and_a_skipped_one_counts_for_none(
    name: str,
):
    """A line from 0.1 to 0 in four steps: 0.1, 0.075, 0.05. The third is spoiled, so the rate of
    the next one would be 0.05 again.
    """
    falling = settings(optimizer=name, schedule=Schedule(kind="linear", steps=4))
    for steps, rate, taken in ((1, 0.1, 1), (2, 0.075, 2), (3, 0.05, 3)):
        record = trained(falling, steps)[1][0]
        assert (float(record.learning_rate), int(record.steps)) == (pytest.approx(rate), taken)
    spoiled = trained(falling, 3, spoil=True)[1][0]
    assert (float(spoiled.learning_rate), int(spoiled.steps)) == (pytest.approx(0.05), 2)
