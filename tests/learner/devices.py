"""Programs that have several devices of JAX, in one process or in two that meet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from streamrl.stream.local_kafka.ports import free_port
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0


def environment(devices: int) -> dict[str, str]:
    """The environment of a process with so many devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run_on_eight(module: str, *arguments: str | Path) -> None:
    """Run the module in a process with eight devices."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment(8),
        capture_output=True,
        text=True,
        timeout=patience(LIMIT_S),
    )
    assert done.returncode == 0, done.stderr[-3000:]


def run_on_two_by_four(
    module: str, arguments: Callable[[str, int], Sequence[str | Path]], logs: Path
) -> None:
    """Run the module in two processes with four devices each. `arguments`: what the process of a
    number is given, by the coordinator's address and its number. `logs`: a directory for what they
    print.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    written = [logs / f"process-{number}.log" for number in range(2)]
    processes = list[subprocess.Popen[bytes]]()
    try:
        for number, path in enumerate(written):
            with path.open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *arguments(coordinator, number)],
                        cwd=ROOT,
                        env=environment(4),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process, path in zip(processes, written, strict=True):
            code = process.wait(patience(LIMIT_S))
            assert code == 0, f"exit code {code}: {path.read_text()[-3000:]}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
