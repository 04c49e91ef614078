"""Builds the example env in Go; what it needs is fetched when the tests are set up (Makefile)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "examples" / "go-env"


def built(directory: Path) -> Path:
    """The program, in that directory."""
    program = directory / "go-env"
    environment = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    subprocess.run(
        ["go", "build", "-o", str(program), "."], cwd=SOURCE, env=environment, check=True
    )
    return program
