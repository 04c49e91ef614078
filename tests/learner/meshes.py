"""The gradient of one batch on 8 devices, divided in several ways:

python -m tests.learner.meshes MODEL OUT [dense | mixture | nodes [COORDINATOR PROCESS]]

It needs 8 devices. `mixture`: the model is a mixture of experts. `nodes`: the devices are those of
two processes, which meet at the COORDINATOR.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from streamrl.config.sections.learner import Learner, Mesh
from streamrl.learner.model import model
from streamrl.learner.update import Updater
from tests.learner.conftest import CONTEXT
from tests.learner.gradients import ROWS, batch, gradient

MESHES = {
    "fsdp": Mesh(data=8),
    "tensor": Mesh(data=4, model=2),
    "hybrid": Mesh(data=2, replica=2, model=2),
    "context": Mesh(data=4, context=2),
}
MIXTURE_MESHES = {
    "fsdp": Mesh(data=8),
    "tensor": Mesh(data=4, model=2),
    "experts": Mesh(data=4, expert=2),
    "experts and tensor": Mesh(data=2, expert=2, model=2),
}
# Two processes with four devices each. The last mesh is that of each node.
NODES_MESHES = {
    "fsdp": Mesh(data=8),
    "tensor": Mesh(data=4, model=2),
    "hybrid": Mesh(data=2, replica=2, model=2),
    "nodes divide": Mesh(data=2, model=2, nodes="divide"),
}
KINDS = {"dense": MESHES, "mixture": MIXTURE_MESHES, "nodes": NODES_MESHES}


def reference_rows(directory: Path) -> np.ndarray:
    """Rows whose logprobs under the reference are computed together, and how many of them each
    device has: (2,) int32.
    """
    settings = Learner()
    updater = Updater(settings, ROWS, CONTEXT)
    with updater.training():
        (micro_batch,) = updater.micro_batch_logprobs(
            model.load(directory, CONTEXT, settings, frozen=True), batch()
        )
        rows = {shard.data.shape[0] for shard in micro_batch.addressable_shards}
        return np.array([micro_batch.shape[0], max(rows)], np.int32)


def meet(coordinator: str, process: int) -> None:
    """Make the devices of two processes one learner's."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, process)


def make_processes_nodes() -> None:
    """Give devices the node that JAX knows of a GPU: here that is its process."""
    setattr(type(jax.devices()[0]), "slice_index", property(lambda device: device.process_index))  # noqa: B010


def keep_share(shares: list[float], state: Any) -> None:
    """Note which part of the embedding each device has."""
    weight: jax.Array = state.model.embeddings.token_embeddings.weight.array
    shares.append(weight.addressable_shards[0].data.size / weight.size)


def main(
    directory: str, out: str, kind: str = "dense", coordinator: str = "", process: str = "0"
) -> None:
    if kind == "nodes":
        meet(coordinator, int(process))
    assert jax.device_count() == 8
    found = dict[str, np.ndarray]()
    if kind == "dense":
        found["reference rows"] = reference_rows(Path(directory))
    for name, mesh in KINDS[kind].items():
        if mesh.nodes == "divide":
            make_processes_nodes()
        shares = list[float]()
        taken = gradient(Path(directory), look=partial(keep_share, shares), mesh=mesh)
        found[f"share/{name}"] = np.array(shares)
        for key, array in taken.items():
            found[f"{name}/{key}"] = np.ascontiguousarray(array)
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
