"""One batch has one gradient, however it is cut: over micro-batches, over two devices, over two JAX processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.learner.gradients import gradient

TOLERANCE = 1e-6
PATIENCE_S = 300.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tiny: Path) -> dict[str, np.ndarray]:
    """On one device, in one part."""
    found = gradient(tiny)
    assert max(float(np.abs(array).max()) for name, array in found.items() if name not in ("loss", "kl")) > 1e-2 and found["kl"][0] > 1e-6
    return found


def check(found: dict[str, np.ndarray], whole: dict[str, np.ndarray], how: str) -> None:
    assert found.keys() == whole.keys()
    worst = max(float(np.abs(found[name] - whole[name]).max()) for name in whole)
    print(f"{how}: at most {worst:.1e} from the gradient of one batch on one device")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("rows", [1, 3])
def test_micro_batches_add_up(tiny: Path, whole: dict[str, np.ndarray], rows: int):
    """Four parts of one row; two of three, the second of which is filled up with padding."""
    check(gradient(tiny, rows), whole, f"micro-batches of {rows}")


def launch(tiny: Path, out: Path, *arguments: object, devices: int = 1) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", "tests.learner.gradients", str(tiny), str(out), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(processes: list[subprocess.Popen[str]]) -> None:
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(text[-3000:] for text in said)


def read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    with safe_open(path, "np") as file:
        return file.metadata()["devices"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_two_devices_add_up(tiny: Path, whole: dict[str, np.ndarray], tmp_path: Path):
    finish([launch(tiny, tmp_path / "two", devices=2)])
    how, found = read(tmp_path / "two")
    assert how == "1x2"
    check(found, whole, "two devices")


def test_two_processes_add_up(tiny: Path, whole: dict[str, np.ndarray], tmp_path: Path):
    """In micro-batches, too: one row of each process at a time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    finish([launch(tiny, tmp_path / str(i), 1, coordinator, 2, i) for i in range(2)])
    for i in range(2):
        how, found = read(tmp_path / str(i))
        assert how == "2x2"
        check(found, whole, f"two processes, as process {i} has it")
