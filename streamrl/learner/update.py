"""One step of training: (state, batch) to (state, metrics), by the Levanter trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
import optax
from haliax import NamedArray
from levanter.metrics import Metric, ReductionType
from levanter.tracker import Tracker
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from streamrl.batcher.packing import RlExample
from streamrl.config import Learner
from streamrl.errors import ModelError
from streamrl.learner.losses import Divergence, Loss, divergence_named, loss_named, masked_mean, ratio
from streamrl.learner.mesh import trainer_config
from streamrl.learner.model import named, predict

SAME = 1e-6  # advantages whose standard deviation is below this are taken as equal: there is no scale to divide by


class Objective(NamedTuple):
    """What is minimised: the policy loss and, weighted, the divergence from the reference, both averaged over the sampled tokens."""

    config: Learner
    loss: Loss
    divergence: Divergence

    def __call__(self, model: Any, arrays: tuple[NamedArray, ...], *, key: Any = None) -> tuple[jax.Array, dict[str, Metric]]:
        """Scalar loss, and metrics. `arrays`: the fields of an RlExample, named, for the trainer shards by the names of axes."""
        example = RlExample(*(cast(Any, array.array) for array in arrays))
        c, mask, policy, predicted = self.config, jnp.asarray(example.loss_mask), jnp.asarray(example.policy_logprobs), predict(model, example)
        current = jnp.where(mask > 0, predicted.logprobs, 0.0)
        loss = masked_mean(self.loss(current, policy, jnp.asarray(example.advantages), c.clip_epsilon), mask)
        ratios = ratio(current, policy)
        means = {
            "policy_loss": loss,
            "entropy": masked_mean(predicted.entropy, mask),
            "ratio_mean": masked_mean(ratios, mask),
            "clip_fraction": masked_mean((jnp.abs(ratios - 1) > c.clip_epsilon).astype(jnp.float32), mask),
        }
        if c.kl_coefficient > 0:  # otherwise nobody has asked the reference
            means["kl"] = masked_mean(self.divergence(current, jnp.asarray(example.reference_logprobs)), mask)
            loss += c.kl_coefficient * means["kl"]
        metrics = {name: Metric.from_value(value, ReductionType.MEAN) for name, value in means.items()}
        metrics["ratio_max"] = Metric.from_value(jnp.max(jnp.where(mask > 0, ratios, 0.0)), ReductionType.MAX)
        return loss, metrics


class GradientNorm(NamedTuple):
    """Optimiser state that remembers the norm of the last gradient, before clipping."""

    norm: jax.Array


def note_norm() -> optax.GradientTransformation:
    """Changes nothing; its state is the global norm of what passes."""
    return optax.GradientTransformation(
        lambda params: GradientNorm(jnp.zeros(())),
        lambda updates, state, params=None: (updates, GradientNorm(jnp.asarray(optax.global_norm(updates)))),
    )


def optimizer(config: Learner) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm, with a linear warm-up."""
    schedule = optax.linear_schedule(config.learning_rate / max(config.warmup_steps, 1), config.learning_rate, config.warmup_steps)
    adamw = optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay)
    return optax.chain(note_norm(), optax.clip_by_global_norm(config.max_grad_norm), adamw)


class Kept(Tracker):
    """Keeps what the trainer logs of a step."""

    name = "kept"

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def log_hyperparameters(self, hparams: Any) -> None: ...

    def log(self, metrics: Any, *, step: int | None, commit: bool | None = None) -> None:
        self.values |= metrics

    def log_summary(self, metrics: Any) -> None: ...

    def log_artifact(self, artifact_path: Any, *, name: str | None = None, type: str | None = None) -> None: ...

    def finish(self) -> None: ...


class Updater:
    """The trainer, for batches of `rows` rows. To be used inside `training()`: Levanter needs its mesh. Raises ConfigError for an unknown loss."""

    def __init__(self, config: Learner, rows: int) -> None:
        self.config = config
        objective = Objective(config, loss_named(config.loss), divergence_named(config.kl))
        self._trainer = Trainer(trainer_config(rows), optimizer(config), cast(Any, objective), add_default_hooks=False)
        self._tracker = Kept()
        self._logprobs = eqx.filter_jit(lambda model, example: predict(model, example).logprobs)

    @contextmanager
    def training(self) -> Generator[None]:
        with self._trainer, levanter.tracker.current_tracker(self._tracker):
            yield

    def initial_state(self, model: Any) -> TrainerState[Any]:
        return self._trainer.initial_state(jax.random.PRNGKey(self.config.seed), model=model)

    def step(self, state: TrainerState[Any], reference: Any, example: RlExample) -> tuple[TrainerState[Any], dict[str, float]]:
        """Train on one batch. `reference`: the model that the divergence is measured from; None, if its coefficient is 0.

        Raises ModelError when the loss or the gradient is not finite: the state that would follow is worth nothing.
        """
        started = time.monotonic()
        if self.config.normalize_advantages:
            example = normalized(example)
        if self.config.kl_coefficient > 0:
            example = example._replace(reference_logprobs=np.where(example.loss_mask > 0, self.logprobs(reference, example), np.float32(0)))
        info = self._trainer.train_step(state, tuple(map(named, example)))
        measured = {name.removeprefix("train/"): float(value) for name, value in self._tracker.values.items() if name.startswith("train/")}
        noted: GradientNorm = cast(Any, info.state.opt_state)[0]
        measured |= {"loss": float(info.loss), "grad_norm": float(noted.norm)}
        if not (math.isfinite(measured["loss"]) and math.isfinite(measured["grad_norm"])):
            seen = f"loss {measured['loss']:g}, gradient norm {measured['grad_norm']:g}"
            raise ModelError(f"{seen}: training has diverged; lower learner.learning_rate, or look at the batch")
        elapsed_s = time.monotonic() - started
        return info.state, {**measured, "step_s": elapsed_s, "tokens_per_s": float((example.segment_ids > 0).sum()) / elapsed_s}

    def logprobs(self, model: Any, example: RlExample) -> np.ndarray:
        """(rows, max_seq_len) float32 of the next tokens, as `model.predict`."""
        return np.asarray(self._logprobs(model, example))


def normalized(example: RlExample) -> RlExample:
    """Advantages divided by their standard deviation over the sampled tokens of the batch: steps stay as large when rewards come close together.

    Longer rollouts count for more, as they do in the loss. The mean stays: the advantage function chose its baseline. Equal ones are left alone.
    """
    sampled = example.advantages[example.loss_mask > 0]
    scale = float(sampled.std(dtype=np.float64)) if sampled.size else 0.0
    return example._replace(advantages=example.advantages / np.float32(scale)) if scale > SAME else example
