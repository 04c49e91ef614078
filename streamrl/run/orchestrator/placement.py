"""Which GPUs a part sees: `placement` of the run file as the environment of the part's process."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.operation import Placement
from streamrl.config.topology import Part
from streamrl.system.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
JAX_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"


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
    placement = run.placement.get(part.name) or run.placement.get(part.role) or Placement()
    devices = topology.devices_of(run, part)
    if visible is not None and devices and max(devices) >= len(visible):
        raise ConfigError(
            f"placement of {part.name}: there is no device {max(devices)}, as {VISIBLE} has"
            f" {len(visible)}; count from 0 among those"
        )
    names = [str(device) if visible is None else visible[device] for device in devices]
    variables = {VISIBLE: ",".join(names)}
    if placement.memory_fraction:
        variables[JAX_MEMORY] = str(placement.memory_fraction)
    return variables
