"""Which GPUs a part sees: `placement` of the run file as the environment of the part's process."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.operation import Placement
from streamrl.config.topology import Part
from streamrl.run.orchestrator.gpus import check_driver, installed_gpus
from streamrl.system.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
JAX_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
CUDA_PLUGIN = "jax_cuda13_plugin"  # of JAX; without it learner and servers are those of a CPU


def placed_here(run: RunFile, parts: Sequence[Part]) -> RunFile:
    """The run with a place on this machine's GPUs for each of the `parts` that are started here.

    A run without `placement` is placed on the only GPU, which its parts share. Raises ConfigError
    for several GPUs, for parts of several machines, and for a driver that is too old.
    """
    nodes = {device.node for part in parts for device in topology.devices_of(run, part)}
    if len(nodes) > 1:
        raise ConfigError(
            f"placement names the machines {', '.join(sorted(nodes))}: start on each what is its"
            " own, with --only or --except"
        )
    if not importlib.util.find_spec(CUDA_PLUGIN):
        return run
    gpus = installed_gpus()
    check_driver(gpus)
    visible = visible_devices(os.environ.get(VISIBLE))
    count = len(gpus) if visible is None else len(visible)
    users = [part for part in parts if topology.uses_gpu(part)]
    if run.placement or not count or len(users) < 2:
        return run
    if count > 1:
        raise ConfigError(
            f"this machine has {count} GPUs, and {', '.join(part.name for part in users)} would"
            " all begin with the first: write placement, such as {learner: {devices: [0]},"
            f" inference: {{devices: [1]}}}}, or set {VISIBLE}=0 and they share that one"
        )
    shared = {part.role: Placement(devices=[0]) for part in users}
    return run.model_copy(update={"placement": shared}).with_shares()


def visible_devices(environment: str | None) -> list[str] | None:
    """The GPUs that this process sees itself, by `CUDA_VISIBLE_DEVICES`. None: all of the machine.

    A scheduler that gave a job GPUs 4 to 7 has set it to 4,5,6,7; device 0 of the run file is 4.
    """
    if environment is None:
        return None
    return [device.strip() for device in environment.split(",") if device.strip()]


def device_variables(
    run: RunFile, part: Part, visible: Sequence[str] | None = None
) -> dict[str, str]:
    """The variables that give a part its GPUs. Parts that the placement does not name see none.

    Empty without a placement: each part sees what the orchestrator sees. Raises ConfigError for a
    device that the orchestrator does not see.
    """
    if not run.placement:
        return {}
    devices = [device.number for device in topology.devices_of(run, part)]
    if visible is not None and devices and max(devices) >= len(visible):
        raise ConfigError(
            f"placement of {part.name}: there is no device {max(devices)}, as {VISIBLE} has"
            f" {len(visible)}; count from 0 among those"
        )
    names = [str(device) if visible is None else visible[device] for device in devices]
    return {VISIBLE: ",".join(names), **memory_variables(run, part)}


def memory_variables(run: RunFile, part: Part) -> dict[str, str]:
    """The variable that tells JAX which share of each GPU's memory the part reserves; empty where
    the placement gives none.
    """
    placement = topology.placement_of(run, part) or Placement()
    return {JAX_MEMORY: str(placement.memory_fraction)} if placement.memory_fraction else {}
