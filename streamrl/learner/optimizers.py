"""The optimizer of a run file, and what stands around it: the norm of the gradient is recorded, and
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


# What a run file's settings become. The first of these sees the gradient.
Build = Callable[[Learner], tuple[optax.GradientTransformation, ...]]
STEPS = 2**31 - 1  # Levanter asks for a number of steps; the schedule does not depend on it.


def adamw(config: Learner) -> tuple[optax.GradientTransformation, ...]:
    """AdamW, arXiv:1711.05101, behind clipping by the global norm. All parameters decay."""
    return (
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            learning_rate(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
        ),
    )


def levanter(kind: type[OptimizerConfig], **own: Any) -> Build:
    """An optimizer of Levanter, with the settings that it has in common with the run file, and its
    `own`. Norms and embeddings do not decay.
    """

    def build(config: Learner) -> tuple[optax.GradientTransformation, ...]:
        made = cast(Any, kind)(
            learning_rate=config.learning_rate,
            lr_schedule=RunSchedule(learning_rate(config)),
            warmup=0,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            **own,
        )
        return (made.build(STEPS),)

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
"""By the names of `learner.optimizer`."""


class GradientNorm(NamedTuple):
    """Optimizer state that records the norm of the last gradient, before clipping."""

    norm: jax.Array


def record_global_norm() -> optax.GradientTransformation:
    """A transformation that changes nothing and records the global norm of the updates in its
    state.
    """
    return optax.GradientTransformation(
        lambda params: GradientNorm(jnp.zeros(())),
        lambda updates, state, params=None: (
            updates,
            GradientNorm(jnp.asarray(optax.global_norm(updates))),
        ),
    )


def make_optimizer(config: Learner) -> optax.GradientTransformationExtraArgs:
    """The optimizer of the settings. Its state begins with a `GradientNorm`."""
    build = OPTIMIZERS[config.optimizer]
    return skip_not_finite(optax.chain(record_global_norm(), *build(config)))


def skip_not_finite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that a step whose loss or gradient norm is not finite changes neither the
    parameters nor the optimizer's state.

    The decision is made inside the compiled step, because the step reuses the memory of the old
    state for the new one. `inner` is a chain that begins with `record_global_norm`, whose state is
    updated in any case.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, loss: Any = 0.0, **_: Any
    ) -> tuple[Any, Any]:
        changes, changed = cast(tuple[Any, Any], inner.update(updates, state, params))
        noted, *after = changed
        finite = jnp.isfinite(noted.norm) & jnp.isfinite(jnp.asarray(getattr(loss, "array", loss)))
        changes = jax.tree.map(
            lambda change: jnp.where(finite, change, jnp.zeros_like(change)), changes
        )
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), tuple(after), tuple(state[1:])
        )
        return changes, (noted, *kept)

    return optax.GradientTransformationExtraArgs(inner.init, cast(Any, update))
