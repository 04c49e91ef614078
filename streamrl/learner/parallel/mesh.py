"""Settings of Levanter and JAX: the trainer's configuration, a mesh for use outside a trainer,
determinism, memory, and the compilation cache.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import haliax as hax
import haliax.partitioning
import jax
import numpy as np
from haliax import NamedArray
from jax.sharding import NamedSharding
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import DEFAULT_DP_AXES, MeshConfig

from streamrl.config.run_file import RunFile
from streamrl.config.sections.learner import Learner, Mesh
from streamrl.learner.model.experts import EXPERT
from streamrl.learner.model.model import BATCH, axes_of, compute_policy
from streamrl.system.errors import ConfigError
from streamrl.system.files import remove_least_recently_used
from streamrl.system.tuning import return_freed_arrays

logger = logging.getLogger(__name__)

COMPILED = ".compiled"  # directory of compiled programs in `runs_dir`; it may be deleted
COMPILED_BYTES = 10 << 30  # the least recently used programs go where there are more
NODES = "replica_dcn"  # Levanter's name of the mesh's axis of nodes


def trainer_config(
    rows: int = 1, micro_batch_rows: int = 1, compute: Learner | None = None
) -> TrainerConfig:
    """A configuration for all devices, each of which processes `micro_batch_rows` of the `rows` at
    a time. `compute`: how the learner computes.

    Levanter's tracker, checkpoints and checks for a non-finite loss are off, because streamrl has
    its own. Raises ConfigError for a mesh that is not for the devices that there are.
    """
    compute = compute or Learner()
    return TrainerConfig(
        id="streamrl",
        tracker=NoopConfig(),
        require_accelerator=False,
        mp=compute_policy(compute.precision),
        mesh=mesh_config(compute.mesh),
        train_batch_size=rows,
        per_device_parallelism=micro_batch_rows,
        num_train_steps=2**31 - 1,
        log_jaxprs=False,
        log_xla_hlo=False,
        load_checkpoint=False,  # or it looks for one below the current directory
        crash_on_nan=False,
        crash_on_inf=False,
    )


def mesh_config(mesh: Mesh) -> MeshConfig:
    """Levanter's mesh. Parameters and optimizer are divided by `data` and `model`, those of experts
    by `expert`, too; rows by `data`, `replica` and `expert`, tokens of a row by `context`. Raises
    ConfigError.
    """
    # Where JAX knows the nodes, each node has such a mesh.
    nodes = 1 + max(getattr(device, "slice_index", 0) for device in jax.devices())
    devices = jax.device_count() // nodes
    others = mesh.replica * mesh.model * mesh.context * mesh.expert
    fits = devices % others == 0 if mesh.data < 0 else devices == others * mesh.data
    if not fits:
        raise ConfigError(
            f"learner.mesh is for {others * abs(mesh.data)} devices, and there are {devices}; the"
            " product of its sizes has to be the number of devices"
        )
    axes = {
        "data": mesh.data,
        "replica": mesh.replica,
        "model": mesh.model,
        "context": mesh.context,
    }
    if mesh.expert > 1:
        axes[EXPERT] = mesh.expert
    # Levanter divides the MLP and the output of attention; this divides queries, keys and values.
    shared = {"kv_head": "model"} if mesh.model > 1 else {}
    compute: dict[str, list[str] | str] = {"position": "context"} if mesh.context > 1 else {}
    # The axis of the nodes has size 1 where JAX does not know them.
    parameters: dict[str, list[str] | str] = {"embed": "data"}
    if mesh.nodes == "divide":
        parameters["embed"] = [NODES, "data"]
    if mesh.expert > 1:
        compute[BATCH] = [*DEFAULT_DP_AXES, EXPERT]
        parameters["experts"] = EXPERT
    return MeshConfig(
        axes=axes,
        shared_mapping=shared,
        compute_mapping=compute,
        param_mapping=parameters,
    )


def data_parallel_devices(compute: Learner) -> int:
    """The number of devices, or groups of devices, that have separate rows."""
    return trainer_config(compute=compute).data_axis_size


def check_division(compute: Learner, processes: int) -> None:
    """Warn if batches are divided for another number of `processes` than there are devices with
    rows of their own. Raises ConfigError for a mesh that is not for the devices that there are.
    """
    devices = data_parallel_devices(compute)
    if devices != processes:
        logger.warning(
            "batches are divided for %d processes, and the rows of this learner among %d devices;"
            " set batcher.processes",
            processes,
            devices,
        )


@contextmanager
def use_mesh() -> Generator[None]:
    """A device mesh, for making or loading a model outside a trainer."""
    config = trainer_config()
    with (
        haliax.partitioning.set_mesh(config.device_mesh),
        hax.axis_mapping(config.compute_axis_mapping),
    ):
        yield


def shard_rows(array: np.ndarray, trainer: Trainer) -> NamedArray:
    """Distribute a (rows, max_seq_len, ...) array over the trainer's devices. Every process passes
    the whole array and keeps the part of its devices.
    """
    axes = axes_of(array)
    sharding = NamedSharding(
        trainer.device_mesh, haliax.partitioning.pspec_for_axis(axes, trainer.compute_axis_mapping)
    )
    return hax.named(
        jax.make_array_from_callback(array.shape, sharding, lambda part: array[part]), axes
    )


def prepare_process(run: RunFile) -> None:
    """Settings of a process that computes with a model of the run. Call this before JAX computes
    anything, and before it compiles anything: it looks for its cache only once.
    """
    return_freed_arrays()
    if run.learner.deterministic:
        make_deterministic()
    if jax.config.values["jax_compilation_cache_dir"] is None:  # else the user has named one
        # All runs of `runs_dir` share it, because a first step may compile for minutes. A program's
        # place in it follows from all that it is compiled from.
        enable_compilation_cache(run.directory.parent / COMPILED)


def make_deterministic() -> None:
    """Make GPUs compute the same bits every time. This must be called before JAX computes anything.
    Otherwise the gradient of an embedding, for example, depends on a race of atomic additions.

    A version that is trained again after a crash then has the announced hash on the same devices.
    On other devices than GPUs this changes nothing.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if (
        "xla_gpu_deterministic_ops" not in flags
        and "xla_gpu_exclude_nondeterministic_ops" not in flags
    ):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()


def enable_compilation_cache(directory: Path) -> None:
    """Cache compiled programs in `directory`, so that a restarted learner, and the next run, train
    within seconds.

    JAX's own limit of its size is not used: one program without its `-atime` file, which a killed
    process leaves, and each of a process that has no limit, ends all writing into the directory.
    """
    remove_least_recently_used(directory, COMPILED_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
