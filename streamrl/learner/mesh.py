"""What the learner sets of Levanter and JAX: the trainer's configuration, a mesh where there is no
trainer, compiled programs that are kept.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import haliax as hax
import haliax.partitioning
import jax
import jmp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from streamrl.learner.model import BATCH, POSITION


def trainer_config(rows: int = 1, micro_batch_rows: int = 1) -> TrainerConfig:
    """In float32 on whatever devices there are, each working on `micro_batch_rows` of all the
    `rows` at a time.

    Tracker, checkpoints and the check for a loss that is not finite are ours, and off here.
    """
    return TrainerConfig(
        id="streamrl",
        tracker=NoopConfig(),
        require_accelerator=False,
        mp=jmp.get_policy("f32"),
        train_batch_size=rows,
        per_device_parallelism=micro_batch_rows,
        num_train_steps=2**31 - 1,
        log_jaxprs=False,
        log_xla_hlo=False,
        load_checkpoint=False,  # or it looks for one below the current directory
        crash_on_nan=False,
        crash_on_inf=False,
    )


@contextmanager
def use_mesh() -> Generator[None]:
    """To make or load a model in, outside a trainer."""
    config = trainer_config()
    with (
        haliax.partitioning.set_mesh(config.device_mesh),
        hax.axis_mapping(config.compute_axis_mapping),
    ):
        yield


def shard_rows(array: np.ndarray, trainer: Trainer) -> NamedArray:
    """(rows, max_seq_len) over the trainer's devices. Every process is given the whole array, and
    keeps what its own devices work on.
    """
    axes = (Axis(BATCH, array.shape[0]), Axis(POSITION, array.shape[1]))
    sharding = NamedSharding(
        trainer.device_mesh, haliax.partitioning.pspec_for_axis(axes, trainer.compute_axis_mapping)
    )
    return hax.named(
        jax.make_array_from_callback(array.shape, sharding, lambda part: array[part]), axes
    )


def make_deterministic() -> None:
    """Have GPUs compute the same bits again; before JAX computes anything. Without it the gradient
    of an embedding, for one, is a race of atomics.

    A version that is trained again after a crash then comes out as it was announced, on the same
    devices. Elsewhere than on GPUs it changes nothing.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if (
        "xla_gpu_deterministic_ops" not in flags
        and "xla_gpu_exclude_nondeterministic_ops" not in flags
    ):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()


def enable_compilation_cache(directory: Path) -> None:
    """Keep what JAX compiles there: a learner that is restarted trains again within seconds."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
