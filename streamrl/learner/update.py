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
from jax.experimental.multihost_utils import process_allgather
from levanter.tracker import Tracker
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from streamrl.batcher.packing import RlExample, blank
from streamrl.config import Learner
from streamrl.errors import ModelError
from streamrl.learner.averages import AVERAGES
from streamrl.learner.losses import AVERAGE_OF
from streamrl.learner.mesh import spread, trainer_config
from streamrl.learner.model import predict
from streamrl.learner.objective import objective, summed_up

SAME = 1e-6  # advantages whose standard deviation is below this are taken as equal: there is no scale to divide by


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
    """The trainer, for batches of `rows` rows. To be used inside `training()`: Levanter needs its mesh. Raises ConfigError for an unknown loss.

    With several devices, of one process or of many, every process has the whole batch, and works on the rows of its own devices: each device on a
    stretch of them, in the order of the batch. So the batcher, which says which rows are a process's, divides the work.
    """

    def __init__(self, config: Learner, rows: int) -> None:
        self.config = config
        of_device = config.micro_batch_rows or -(-rows // jax.device_count())  # rows that it works on at a time
        parts = -(-rows // (of_device * jax.device_count()))
        self.order = order(rows, jax.device_count(), parts, of_device)
        self._average = AVERAGES[config.average or AVERAGE_OF.get(config.loss, "tokens")]
        settings, minimised = trainer_config(len(self.order), of_device), cast(Any, objective(config, parts))
        self._trainer = Trainer(settings, optimizer(config), minimised, add_default_hooks=False)
        self._tracker = Kept()
        self._logprobs = eqx.filter_jit(lambda model, example: predict(model, example).logprobs)

    @contextmanager
    def training(self) -> Generator[None]:
        with self.meshed(), levanter.tracker.current_tracker(self._tracker):
            yield

    @contextmanager
    def meshed(self) -> Generator[None]:
        """Enough to compute logprobs in."""
        with self._trainer:
            yield

    def initial_state(self, model: Any) -> TrainerState[Any]:
        return self._trainer.initial_state(jax.random.PRNGKey(self.config.seed), model=model)

    def step(self, state: TrainerState[Any], reference: Any, example: RlExample) -> tuple[TrainerState[Any], dict[str, float]]:
        """Train on one batch. `reference`: the model that the divergence is measured from; None where the example has them, or none are asked.

        Raises ModelError when the loss or the gradient is not finite: the state that would follow is worth nothing.
        """
        started = time.monotonic()
        if self.config.refers and reference is not None:
            example = example._replace(reference_logprobs=self.scores(reference, example))
        example = arranged(example, self.order)
        if self.config.normalize_advantages:
            example = normalized(example)
        weights = self._average(example.loss_mask, example.segment_ids)
        info = self._trainer.train_step(state, tuple(spread(array, self._trainer) for array in (*example, weights)))
        measured = {name.removeprefix("train/"): float(value) for name, value in self._tracker.values.items() if name.startswith("train/")}
        noted: GradientNorm = cast(Any, info.state.opt_state)[0]
        measured = {**summed_up(measured), "loss": float(info.loss), "grad_norm": float(noted.norm)}
        if not (math.isfinite(measured["loss"]) and math.isfinite(measured["grad_norm"])):
            seen = f"loss {measured['loss']:g}, gradient norm {measured['grad_norm']:g}"
            raise ModelError(f"{seen}: training has diverged; lower learner.learning_rate, or look at the batch")
        elapsed_s = time.monotonic() - started
        return info.state, {**measured, "step_s": elapsed_s, "tokens_per_s": float((example.segment_ids > 0).sum()) / elapsed_s}

    def scores(self, model: Any, example: RlExample) -> np.ndarray:
        """Logprobs of the sampled tokens under a reference: (rows, max_seq_len) float32, 0 elsewhere.

        The learner asks it and so does the scorer pool: the same rows make the same program, and on the same devices the same bits.
        """
        found = self.logprobs(model, arranged(example, self.order))
        return np.where(example.loss_mask > 0, as_they_came(found, self.order, len(example.input_ids)), np.float32(0))

    def logprobs(self, model: Any, example: RlExample) -> np.ndarray:
        """(rows, max_seq_len) float32 of the next tokens, as `model.predict`."""
        return np.asarray(process_allgather(self._logprobs(model, example), tiled=True))


def order(rows: int, devices: int, parts: int, of_device: int) -> np.ndarray:
    """Which row of a batch of `rows` lies where, for a trainer that takes `of_device` rows for each device at a time, in `parts` such turns.

    Each device has a stretch of rows, with padding behind it. Returns (parts * devices * of_device,) int; -1 is a row of padding.
    """
    stretch = -(-rows // devices)
    of_each = np.full((devices, parts * of_device), -1)
    of_each[:, :stretch] = np.where((numbers := np.arange(devices * stretch)) < rows, numbers, -1).reshape(devices, stretch)
    return of_each.reshape(devices, parts, of_device).swapaxes(0, 1).reshape(-1)


def arranged(example: RlExample, order: np.ndarray) -> RlExample:
    """With its rows in that order, and padding where it says so."""
    if np.array_equal(order, np.arange(len(example.input_ids))):
        return example
    padding = blank(1, example.input_ids.shape[1])  # behind the others, where -1 finds it
    return RlExample(*(np.concatenate(pair)[order] for pair in zip(example, padding, strict=True)))


def as_they_came(rows: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """What was found for arranged rows, (len(order), ...), in the order that the batch has them: (count, ...)."""
    back, real = np.empty((count, *rows.shape[1:]), rows.dtype), order >= 0
    back[order[real]] = rows[real]
    return back


def normalized(example: RlExample) -> RlExample:
    """Advantages divided by their standard deviation over the sampled tokens of the batch: steps stay as large when rewards come close together.

    Longer rollouts count for more, as they do in the loss. The mean stays: the advantage function chose its baseline. Equal ones are left alone.
    """
    sampled = example.advantages[example.loss_mask > 0]
    scale = float(sampled.std(dtype=np.float64)) if sampled.size else 0.0
    return example._replace(advantages=example.advantages / np.float32(scale)) if scale > SAME else example
