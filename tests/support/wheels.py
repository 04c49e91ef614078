"""The wheel, built from the sources and installed into environments that have nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import uv

from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
UV = uv.find_uv_bin()


def build_wheel(directory: Path, source: Path = ROOT) -> Path:
    """The path of the wheel, which is built into the directory."""
    build = (UV, "build", "--wheel", "--offline", "--no-build-isolation")
    call(*build, "--python", sys.executable, "-o", directory, source)
    (made,) = directory.glob("*.whl")
    return made


def install_wheel(wheel: Path, environment: Path, extras: str = "") -> None:
    """Make an environment with the wheel and what it depends on, in the versions of the lock file.
    `extras` are those of streamrl, such as `learner,broker`.
    """
    call(UV, "venv", "--offline", "--python", sys.executable, environment)
    what = f"{wheel}[{extras}]" if extras else str(wheel)
    versions = ("--constraint", ROOT / "requirements" / "main.txt")
    allowed = ("--prerelease", "if-necessary-or-explicit")
    install = (UV, "pip", "install", "--python", environment, *versions, *allowed, what)
    try:
        call(*install, "--offline")  # set-up has left all of it in uv's cache
    except AssertionError:
        call(*install)


def call(*command: object, cwd: Path | None = None, limit_s: float = 300) -> str:
    """What a command prints. It has to succeed."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=patience(limit_s),
        cwd=cwd,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout
