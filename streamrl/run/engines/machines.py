"""What every engine is asked for: the machines that `placement` names, what each of them reserves,
and the `streamrl up` that runs its parts there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.verdict import TIME_OVER
from streamrl.run.orchestrator import run_directory
from streamrl.run.orchestrator.requests import Request, machine_request, obstacles
from streamrl.system.errors import ConfigError

STREAMRL = (sys.executable, "-m", "streamrl.cli")
# Exit codes of a machine that has seen the end of the run, as the first one does too. After any
# other one the run lacks its parts, also where a time limit has ended them: the others have to end.
RUN_OVER = (0, TIME_OVER)


class Machine(NamedTuple):
    """A machine that an engine has to find. The first one leads: the run ends with it."""

    name: str  # of its job
    command: list[str]
    request: Request
    leads: bool


def machines(run: RunFile, arguments: Sequence[str]) -> list[Machine]:
    """The machines of a run. The first one leads, and has every part that no other has.

    `arguments`: the run file and options of `streamrl up`, as they are on the command line.
    """
    placed = topology.machines(run)
    found: list[Machine] = []
    for number, (machine, parts) in enumerate(placed.items()):
        chosen = [f"--only={part.name}" for part in parts]
        if number == 0:
            chosen = [
                f"--except={part.name}"
                for other, members in placed.items()
                if other != machine
                for part in members
            ]
        command = [*STREAMRL, "up", *arguments, *chosen]
        found.append(
            Machine(job_name(run, machine), command, machine_request(run, parts), number == 0)
        )
    return found


def job_name(run: RunFile, machine: str) -> str:
    return f"streamrl.{run.run}.{machine}" if machine else f"streamrl.{run.run}"


def prepare(run: RunFile, fresh: bool) -> None:
    """Make the run's directory ready for parts on several machines, with `fresh` a new one. Raises
    ConfigError if they could not reach each other.
    """
    if problem := next(obstacles(run), ""):
        raise ConfigError(problem)
    if fresh:
        with run_directory.lock_run_dir(run, fresh=True):
            (run.directory / run_directory.RUN_FILE).unlink()
    (run.directory / "logs").mkdir(parents=True, exist_ok=True)
