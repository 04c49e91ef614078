"""One batch has one gradient, however it is cut: over micro-batches, over the devices of two JAX
processes. The devices of one process divide it in test_mesh.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

from streamrl.batcher.assemble import UNSHARDED, Sharding
from streamrl.config.sections.learner import TinyModel
from streamrl.learner.initial import write_tiny
from tests.learner.gradients import CONTEXT, divided, gradient
from tests.support.waiting import patience

TOLERANCE = 1e-6
PATIENCE_S = patience(300.0)
ROOT = Path(__file__).parents[2]


class Program(NamedTuple):
    """`tests/learner/gradients.py` at work."""

    process: subprocess.Popen[str]
    out: Path

    def result(self) -> tuple[str, dict[str, np.ndarray]]:
        """What it ran on, as processes x devices, and the gradient."""
        said = self.process.communicate(timeout=PATIENCE_S)[0]
        assert self.process.returncode == 0, said[-3000:]
        with safe_open(self.out, "np") as file:
            return file.metadata()["devices"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(
        tmp_path_factory.mktemp("models") / "small",
        TinyModel(layers=1, hidden=16, head_dim=8, seed=1),
        CONTEXT,
    )


@pytest.fixture(scope="module")
def programs(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Program]]:
    """Two processes with a device each, which take one row each at a time. They import while the
    tests before theirs run.
    """
    directory = tmp_path_factory.mktemp("gradients")

    def launch(out: str, *arguments: object) -> Program:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [
            sys.executable,
            "-m",
            "tests.learner.gradients",
            str(small),
            str(directory / out),
            *map(str, arguments),
        ]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Program(process, directory / out)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    made = [launch(f"process-{i}", 1, coordinator, 2, i) for i in range(2)]
    yield made
    for program in made:
        program.process.kill()
        program.process.wait()


@pytest.fixture(scope="module")
def whole(small: Path, programs: object) -> dict[str, np.ndarray]:
    """On one device, in one part."""
    found = gradient(small)
    assert (
        max(
            float(np.abs(array).max())
            for name, array in found.items()
            if name not in ("loss", "kl", "probe")
        )
        > 1e-2
        and found["kl"][0] > 1e-6
    )
    return found


def check(found: dict[str, np.ndarray], whole: dict[str, np.ndarray], how: str) -> None:
    assert found.keys() == whole.keys()
    worst = max(float(np.abs(found[name] - whole[name]).max()) for name in whole)
    print(f"{how}: at most {worst:.1e} from the gradient of one batch on one device")
    assert worst <= TOLERANCE


def test_micro_batches_add_up(small: Path, whole: dict[str, np.ndarray]):
    """Two parts of three rows, the second of which is filled up with padding."""
    check(gradient(small, 3), whole, "micro-batches of three rows")


def test_what_saves_memory_changes_nothing(small: Path, whole: dict[str, np.ndarray]):
    """Layers computed again, and logits in chunks that do not divide a row."""
    saving = gradient(small, 2, remat="full", logprob_chunk=5)
    check(saving, whole, "remat, and chunks of five tokens")


def test_bfloat16_is_close(small: Path, whole: dict[str, np.ndarray]):
    """Its gradients are float32 still, as are the parameters they are for."""
    found = gradient(small, precision="bf16", remat="full")
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    largest = max(float(np.abs(whole[name]).max()) for name in whole)
    worst = max(float(np.abs(found[name] - whole[name]).max()) for name in whole)
    assert 0 < worst < 0.02 * largest


def test_how_the_batcher_divides_them_does_not_matter(small: Path):
    """Other rollouts in every row, and so in every process's share."""
    whole = divided(UNSHARDED)
    undivided = gradient(small, taken=whole)
    for division in (Sharding(2, "tokens"), Sharding(4, "flops", 2)):
        shared = divided(division)
        assert sorted(map(len, map(np.flatnonzero, shared.loss_mask))) != sorted(
            map(len, map(np.flatnonzero, whole.loss_mask))
        )
        check(
            gradient(small, taken=shared),
            undivided,
            f"divided among {division.processes} processes by {division.balance}",
        )


def test_two_processes_add_up(programs: list[Program], whole: dict[str, np.ndarray]):
    """In micro-batches, too."""
    for i, program in enumerate(programs):
        how, found = program.result()
        assert how == "2x2"
        check(found, whole, f"two processes, as process {i} has it")
