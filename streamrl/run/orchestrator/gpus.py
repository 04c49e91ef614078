"""The NVIDIA GPUs of this machine, as `nvidia-smi` lists them."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from streamrl.system.errors import ConfigError

QUERY = ("--query-gpu=memory.total,driver_version,name", "--format=csv,noheader,nounits")
LEAST_DRIVER = 580  # what CUDA 13 needs, for which both lists of packages are
LIMIT_S = 60.0  # a driver that nothing uses takes seconds to wake up


class Gpu(NamedTuple):
    """A GPU of this machine."""

    memory_gib: float
    driver: str  # version of NVIDIA's driver
    name: str


def installed_gpus() -> list[Gpu]:
    """The GPUs of this machine; empty without NVIDIA's driver."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", *QUERY], capture_output=True, text=True, timeout=LIMIT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found: list[Gpu] = []
    for line in listed.splitlines():
        memory, driver, name = (field.strip() for field in line.split(",", 2))
        # unified memory is not reported
        size = float(memory) / 1024 if memory.replace(".", "").isdigit() else 0.0
        found.append(Gpu(size, driver, name))
    return found


def check_driver(gpus: list[Gpu]) -> None:
    """Raises ConfigError for a driver that is too old for CUDA 13."""
    for gpu in gpus:
        major = gpu.driver.partition(".")[0]
        if major.isdigit() and int(major) < LEAST_DRIVER:
            raise ConfigError(
                f"the driver of the {gpu.name} is {gpu.driver}, and CUDA 13 needs {LEAST_DRIVER} or"
                " newer; install it"
            )
