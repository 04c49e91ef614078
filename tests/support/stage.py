"""`streamrl` with the parts of a chaos run: `python -m tests.support.stage ARGUMENTS OF STREAMRL`.
Buffer and batcher are real; learner and envs are known functions.
"""

from __future__ import annotations

import sys

from streamrl.cli import main
from streamrl.config.run_file import RUN_FILE, RunFile
from streamrl.config.topology import Part
from streamrl.run.engines import machines
from streamrl.run.orchestrator import parts

STAGE = (sys.executable, "-m", "tests.support.stage")


def stand_in(run: RunFile, part: Part) -> list[str]:
    (run.directory / "notes").mkdir(exist_ok=True)
    file = str(run.directory / RUN_FILE)
    return [sys.executable, "-m", "tests.chaos.part", file, part.name, "transactions"]


if __name__ == "__main__":
    parts.command = stand_in
    machines.STREAMRL = STAGE
    main()
