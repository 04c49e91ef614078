"""What the learner sets of Levanter and JAX: the trainer's configuration, a mesh where there is no trainer, compiled programs that are kept."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import haliax as hax
import haliax.partitioning
import jax
import jmp
from levanter.tracker import NoopConfig
from levanter.trainer import TrainerConfig


def trainer_config(rows: int = 1, name: str = "streamrl") -> TrainerConfig:
    """In float32 on whatever devices there are. Tracker, checkpoints and the check for a loss that is not finite are ours, and off here."""
    return TrainerConfig(
        id=name,
        tracker=NoopConfig(),
        require_accelerator=False,
        mp=jmp.get_policy("f32"),
        train_batch_size=rows,
        num_train_steps=2**31 - 1,
        log_jaxprs=False,
        log_xla_hlo=False,
        load_checkpoint=False,  # or it looks for one below the current directory
        crash_on_nan=False,
        crash_on_inf=False,
    )


@contextmanager
def on_mesh() -> Generator[None]:
    """To make or load a model in, outside a trainer."""
    config = trainer_config()
    with haliax.partitioning.set_mesh(config.device_mesh), hax.axis_mapping(config.compute_axis_mapping):
        yield


def keep_compiled(directory: Path) -> None:
    """Keep what JAX compiles there: a learner that is restarted trains again within seconds."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
