"""The optimizer of a run file, and what is around it: the norm of the gradient is recorded, and
a step that is not finite changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from levanter.optim import AdoptConfig, CautiousConfig, LionConfig, MuonConfig, OptimizerConfig
from levanter.optim.config import LrSchedule, LrScheduleContext

from streamrl.config.sections.learner import Learner
from streamrl.learner.schedules import learning_rate


@dataclass(frozen=True)
class RunSchedule(LrSchedule):
    """The run file's schedule, warm-up included, in the place of one of Levanter's."""

    schedule: optax.Schedule

    def build(self, ctx: LrScheduleContext) -> optax.Schedule:
        return self.schedule


# Builds the transformations that the settings ask for. The first of them sees the gradient.
Build = Callable[[Learner], tuple[optax.GradientTransformation, ...]]
STEPS = 2**31 - 1  # Levanter asks for a number of steps; the schedule does not depend on it.


def adamw(config: Learner) -> tuple[optax.GradientTransformation, ...]:
    """AdamW, arXiv:1711.05101, after clipping by the global norm. All parameters decay."""
    return (
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.chain(
            scale_by_adam(config.beta1, config.beta2),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(learning_rate(config)),
        ),
    )


def scale_by_adam(
    beta1: float, beta2: float, epsilon: float = 1e-8
) -> optax.GradientTransformation:
    """The same as optax.scale_by_adam, but the new moments are complete before an update is
    computed from them.

    Otherwise XLA computes the update from the old moments too, and copies both of them before it
    writes the new ones in their place: as much memory as twice the parameters.
    """
    moments = optax.scale_by_adam(beta1, beta2)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, state = moments.update(updates, state)
        state = jax.lax.optimization_barrier(state)
        mean = optax.tree.bias_correction(state.mu, beta1, state.count)
        square = optax.tree.bias_correction(state.nu, beta2, state.count)
        return jax.tree.map(lambda m, s: m / (jnp.sqrt(s) + epsilon), mean, square), state

    return optax.GradientTransformation(moments.init, update)


def levanter(kind: type[OptimizerConfig], **own: Any) -> Build:
    """An optimizer of Levanter, with the settings that it has in common with the run file, and its
    `own`. Norms and embeddings do not decay.
    """

    def build(config: Learner) -> tuple[optax.GradientTransformation, ...]:
        optimizer = cast(Any, kind)(
            learning_rate=config.learning_rate,
            lr_schedule=RunSchedule(learning_rate(config)),
            warmup=0,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            **own,
        )
        return (optimizer.build(STEPS),)

    return build


def muon(config: Learner) -> tuple[optax.GradientTransformation, ...]:
    """Muon for the matrices and AdamW for the rest, at one learning rate: Muon's steps are scaled
    to the size of AdamW's (Moonlight, arXiv:2502.16982).
    """
    return levanter(MuonConfig, adam_lr=config.learning_rate, use_kimi_scaling=True)(config)


OPTIMIZERS: dict[str, Build] = {
    "adamw": adamw,
    "lion": levanter(LionConfig),
    "adopt": levanter(AdoptConfig),
    "cautious": levanter(CautiousConfig),
    "muon": muon,
}
"""The optimizers by the names of `learner.optimizer`."""


class UpdateRecord(NamedTuple):
    """What the optimizer's state records of the last step. All are scalars."""

    norm: jax.Array  # float32: of the gradient, before clipping
    learning_rate: jax.Array  # float32
    steps: jax.Array  # int32: the steps that were taken, skipped ones not counted


def make_optimizer(config: Learner) -> optax.GradientTransformationExtraArgs:
    """The optimizer of the settings. Its state begins with an `UpdateRecord`."""
    optimizer = optax.chain(*OPTIMIZERS[config.optimizer](config))
    return skip_not_finite(optimizer, learning_rate(config))


def skip_not_finite(
    inner: optax.GradientTransformation, rate: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that a step whose loss or gradient norm is not finite changes neither the
    parameters nor the optimizer's state. The state begins with an `UpdateRecord`. `rate`: the
    schedule that `inner` uses, which counts the same steps.

    The decision is made inside the compiled step, because the step reuses the memory of the old
    state for the new one. It is a branch: a choice between two complete states would need both.
    """

    def init(params: Any) -> Any:
        record = UpdateRecord(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))
        return record, *cast(Any, inner.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, *, loss: Any = 0.0, **_: Any
    ) -> tuple[Any, Any]:
        norm = jnp.asarray(optax.global_norm(updates))
        finite = jnp.isfinite(norm) & jnp.isfinite(jnp.asarray(getattr(loss, "array", loss)))
        steps = state[0].steps
        record = UpdateRecord(
            norm=norm,
            learning_rate=jnp.asarray(rate(steps), jnp.float32),
            steps=steps + finite.astype(jnp.int32),
        )
        changes, after = jax.lax.cond(
            finite,
            lambda updates, state: inner.update(updates, state, params),
            lambda updates, state: (jax.tree.map(jnp.zeros_like, updates), state),
            updates,
            state[1:],
        )
        return changes, (record, *after)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
