"""`streamrl up` with actors for parts, but a real broker: `python -m tests.run.orchestrator.stage
ARGUMENTS OF STREAMRL`.
"""

from __future__ import annotations

import os
import sys

from streamrl.cli import main
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Part
from streamrl.run.orchestrator import parts, plan
from streamrl.run.orchestrator.plan import BROKER

RESTARTS = "STAGE_RESTARTS"  # variable of the most restarts of an actor
real = parts.command


def acted(run: RunFile, part: Part) -> list[str]:
    return (
        real(run, part)
        if part.name == BROKER
        else [
            sys.executable,
            "-m",
            "tests.run.orchestrator.actor",
            part.name,
            str(run.directory / "run.yaml"),
        ]
    )


if __name__ == "__main__":
    parts.command = acted
    plan.RESTART_LIMIT = int(os.environ.get(RESTARTS, plan.RESTART_LIMIT))
    main()
