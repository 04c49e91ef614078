"""One optimizer step: (state, batch) to (state, metrics), by the Levanter trainer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, cast

import equinox as eqx
import haliax as hax
import haliax.partitioning
import jax
import levanter.tracker
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from levanter.tracker import Tracker
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from streamrl.config.choices import AVERAGE_OF
from streamrl.config.sections.learner import Learner
from streamrl.learner.adapters import is_trainable
from streamrl.learner.loss.components import compared_mask
from streamrl.learner.loss.normalization import average_named, segment_numbers
from streamrl.learner.loss.objective import make_objective, to_run_metrics
from streamrl.learner.model.examples import RlExample, empty_example
from streamrl.learner.model.model import (
    BATCH,
    POSITION,
    compute_policy,
    predict,
    unnamed,
    with_axes,
)
from streamrl.learner.optimizers import UpdateRecord, make_optimizer
from streamrl.learner.parallel.mesh import data_parallel_devices, shard_rows, trainer_config

logger = logging.getLogger(__name__)

# Advantages with a standard deviation below this are taken as equal, and not divided by it.
MIN_ADVANTAGE_STD = 1e-6


class InMemoryTracker(Tracker):
    """Keeps the metrics that the trainer logs for a step."""

    name = "kept"

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def log_hyperparameters(self, hparams: Any) -> None: ...

    def log(self, metrics: Any, *, step: int | None, commit: bool | None = None) -> None:
        self.values |= metrics

    def log_summary(self, metrics: Any) -> None: ...

    def log_artifact(
        self, artifact_path: Any, *, name: str | None = None, type: str | None = None
    ) -> None: ...

    def finish(self) -> None: ...


class RowLayout(NamedTuple):
    """How batches with a given number of rows are distributed over devices."""

    order: np.ndarray  # of the rows, as `device_row_order` returns it
    micro_batch_rows: int  # that all devices together work on at a time
    trainer: Trainer


class Updater:
    """The Levanter trainer, with a compiled step for each number of rows. It must be used inside
    `training()`, which sets Levanter's mesh. Raises ConfigError for an unknown loss.

    `rows`: the number of rows in the batches that the run file describes. A batch with another
    number of rows, made under earlier settings, is trained on too, after another compilation.
    `max_seq_len`: the run's `batcher.max_seq_len`, by which `average: constant` divides. The rows
    of a batch may be shorter.

    With several devices, in one process or in many, every process has the whole batch and works on
    the rows of its devices. Each device has a stretch of consecutive rows, so the batcher,
    which assigns rows to processes, decides how the work is divided.
    """

    def __init__(self, config: Learner, rows: int, max_seq_len: int) -> None:
        self.config = config
        average = config.average or AVERAGE_OF.get(config.loss, "tokens")
        self._normalize = average_named(average, max_seq_len)
        self._layouts = dict[int, RowLayout]()
        self.trainer = self._layout(rows).trainer
        self._tracker = InMemoryTracker()
        self._logprobs = eqx.filter_jit(self._predict_logprobs)
        self._sharded_logprobs = eqx.filter_jit(self.sharded_logprobs)

    def _predict_logprobs(self, model: Any, example: RlExample) -> jax.Array:
        computed: Any = compute_policy(self.config.precision).cast_to_compute(model)
        return predict(computed, example, self.config.logprob_chunk).logprobs

    def sharded_logprobs(self, model: Any, named: RlExample) -> jax.Array:
        """Logprobs of the next tokens, each row on its device: (rows, max_seq_len) float32.

        `named`: an example with named arrays.
        """
        with hax.axis_mapping(self.trainer.compute_axis_mapping):
            logprobs = self._predict_logprobs(model, unnamed(named))
            return hax.auto_sharded(with_axes(logprobs)).array

    def _layout(self, rows: int) -> RowLayout:
        """The layout for this number of rows. It is made when the first such batch arrives."""
        if rows not in self._layouts:
            devices = data_parallel_devices(self.config)
            # rows that a device works on at a time
            of_device = self.config.micro_batch_rows or -(-rows // devices)
            micro_batches = -(-rows // (of_device * devices))
            order = device_row_order(rows, devices, micro_batches, of_device)
            objective = cast(Any, make_objective(self.config, micro_batches))
            trainer = Trainer(
                trainer_config(len(order), of_device, self.config),
                make_optimizer(self.config),
                objective,
                add_default_hooks=False,
            )
            self._layouts[rows] = RowLayout(order, of_device * devices, trainer)
        return self._layouts[rows]

    @contextmanager
    def training(self) -> Generator[None]:
        with self.trainer, levanter.tracker.current_tracker(self._tracker):
            yield

    @contextmanager
    def use_mesh(self) -> Generator[None]:
        """The mesh alone, for computing logprobs. A trainer also has a tracker, and Levanter allows
        one tracker per process.
        """
        with (
            haliax.partitioning.set_mesh(self.trainer.device_mesh),
            hax.axis_mapping(self.trainer.parameter_axis_mapping),
        ):
            yield

    def initial_state(self, model: Any) -> TrainerState[Any]:
        """The state before the first step. Of a model with adapters only these are trained."""
        return self.trainer.initial_state(
            jax.random.PRNGKey(0), model=model, is_trainable=is_trainable(model)
        )

    def step(
        self,
        state: TrainerState[Any],
        reference: Any,
        example: RlExample,
        rollouts: np.ndarray | None = None,
    ) -> tuple[TrainerState[Any], dict[str, float]]:
        """Train on one batch. `reference` is the model that the divergence is measured from, or
        None if the example has its logprobs or no divergence is used.

        `rollouts`: (rows, max_seq_len) int, the number of the rollout at each position, if some
        rollouts have several segments.

        Returns the new state and the measurements. A step whose loss or gradient is not finite
        changes nothing and reports `skipped` 1. Measurements that are not finite are left out.
        """
        started = time.monotonic()
        layout = self._layout(len(example.input_ids))
        if self.config.reference and reference is not None:
            example = example._replace(reference_logprobs=self.scores(reference, example))
        weights = self._normalize(
            example.loss_mask,
            segment_numbers(example.segment_ids) if rollouts is None else rollouts,
        )
        weights = reorder_rows(example._replace(advantages=weights), layout.order).advantages
        example = reorder_rows(example, layout.order)
        if self.config.normalize_advantages:
            example = normalize_advantages(example)
        inputs = jax.tree.map(lambda array: shard_rows(array, layout.trainer), (example, weights))
        info = layout.trainer.train_step(state, inputs)
        measured = {
            name.removeprefix("train/"): float(value)
            for name, value in self._tracker.values.items()
            if name.startswith("train/")
        }
        record: UpdateRecord = cast(Any, info.state.opt_state)[0]
        measured = {
            **to_run_metrics(measured),
            "loss": float(info.loss),
            "grad_norm": float(record.norm),
            "learning_rate": float(record.learning_rate),
        }
        skipped = not (math.isfinite(measured["loss"]) and math.isfinite(measured["grad_norm"]))
        if skipped:
            logger.warning(
                "loss %g, gradient norm %g: the step is skipped",
                measured["loss"],
                measured["grad_norm"],
            )
        elapsed_s = time.monotonic() - started
        measured |= {
            "step_s": elapsed_s,
            "tokens_per_s": float((example.segment_ids > 0).sum()) / elapsed_s,
            "skipped": float(skipped),
        }
        return info.state, {name: value for name, value in measured.items() if math.isfinite(value)}

    def scores(self, model: Any, example: RlExample) -> np.ndarray:
        """Logprobs of the sampled tokens under a reference: (rows, max_seq_len) float32, 0
        elsewhere.

        The model's own router decides, because the experts of the rollouts are the policy's choice.
        Each device computes its own rows, as many at a time as in training. The learner and the
        scorers both use this: the same number of rows gives the same program, and on the same
        devices the same bits.
        """
        example = example._replace(routed_experts=None)
        order = self._layout(len(example.input_ids)).order
        logprobs = [
            np.asarray(process_allgather(rows, tiled=True))
            for rows in self.micro_batch_logprobs(model, example)
        ]
        return np.where(
            example.loss_mask > 0,
            restore_row_order(np.concatenate(logprobs), order, len(example.input_ids)),
            np.float32(0),
        )

    def micro_batch_logprobs(self, model: Any, example: RlExample) -> Iterator[jax.Array]:
        """The logprobs of each micro-batch, in the order of the layout: (rows, max_seq_len)
        float32, each row on its device.
        """
        layout = self._layout(len(example.input_ids))
        ordered = reorder_rows(example, layout.order)
        for first in range(0, len(layout.order), layout.micro_batch_rows):
            rows = itemgetter(slice(first, first + layout.micro_batch_rows))
            micro_batch = jax.tree.map(rows, ordered)
            sharded = jax.tree.map(partial(shard_rows, trainer=layout.trainer), micro_batch)
            yield self._sharded_logprobs(model, sharded)

    def logprobs(self, model: Any, example: RlExample) -> np.ndarray:
        """Logprobs of the next tokens, as `model.predict` defines them: (rows, max_seq_len)
        float32.

        There may be fewer rows than devices, so rows are not divided. Neither is the width of
        activations: a mixture of experts cannot be computed in such parts.
        """
        computed = self.trainer.compute_axis_mapping.items()
        whole = {axis: over for axis, over in computed if axis not in (BATCH, POSITION)}
        with hax.axis_mapping(whole):
            return np.asarray(process_allgather(self._logprobs(model, example), tiled=True))


def device_row_order(rows: int, devices: int, micro_batches: int, of_device: int) -> np.ndarray:
    """The order of a batch's rows for a trainer that processes `of_device` rows of each device at a
    time, in so many micro-batches.

    Each device has a stretch of consecutive rows, followed by padding. Returns (micro_batches *
    devices * of_device,) int, with -1 for padding. Example: 5 rows on 2 devices, in 2 micro-batches
    of 2 rows of each device, give [0, 1, 3, 4, 2, -1, -1, -1]. The first device has rows 0, 1, 2
    and the second 3, 4.
    """
    stretch = -(-rows // devices)
    slots = np.full((micro_batches, devices, of_device), -1)
    for row in range(rows):
        device, place = divmod(row, stretch)
        micro_batch, slot = divmod(place, of_device)
        slots[micro_batch, device, slot] = row
    return slots.reshape(-1)


def reorder_rows(example: RlExample, order: np.ndarray) -> RlExample:
    """The example with its rows in that order, and padding where the order has -1."""
    if np.array_equal(order, np.arange(len(example.input_ids))):
        return example
    # after the other rows, where -1 finds it
    padding = empty_example(1, example.input_ids.shape[1], optional=RlExample._fields)
    if example.routed_experts is not None:
        padding = padding._replace(routed_experts=np.zeros_like(example.routed_experts[:1]))
    arrays = {
        name: np.concatenate((array, getattr(padding, name)))[order]
        for name, array in example._asdict().items()
        if array is not None
    }
    return RlExample(**arrays)


def restore_row_order(rows: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """The inverse of `reorder_rows` for a result (len(order), ...): returns (count, ...) in the
    order of the batch.
    """
    back = np.empty((count, *rows.shape[1:]), rows.dtype)
    real = order >= 0
    back[order[real]] = rows[real]
    return back


def normalize_advantages(example: RlExample) -> RlExample:
    """Divide advantages by their standard deviation over the tokens of the batch that the policy
    gradient trains, so that the size of a step does not shrink as rewards converge.

    Longer rollouts have more weight, as in the loss. The mean stays, because the advantage function
    has chosen its baseline. Equal advantages are not changed.
    """
    sampled = example.advantages[compared_mask(example)]
    scale = float(sampled.std(dtype=np.float64)) if sampled.size else 0.0
    return (
        example._replace(advantages=example.advantages / np.float32(scale))
        if scale > MIN_ADVANTAGE_STD
        else example
    )
