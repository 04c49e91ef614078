"""`python -m tests.slurm`: a run on three nodes of a real Slurm, two of which are lost in the
middle. Exit code 1 when a job is not continued elsewhere, or the run's account does not balance.

It needs root and Debian's slurm-wlm and munge, and takes some ten minutes.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click

from tests.slurm.cluster import missing, slurm
from tests.support.lost_nodes import prove

NODES = 3
PLACEMENT = {
    "learner": {"nodes": ["trains"], "cpus": 2},
    "buffer": {"nodes": ["collects"]},
    "env": {"nodes": ["samples"]},
}


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("runs/slurm"),
    show_default=True,
    help="Of the run, and of Slurm; must not exist.",
)
def main(directory: Path) -> None:
    """Run on three nodes of a real Slurm, and lose two of them."""
    if lacking := missing():
        sys.exit(f"{', '.join(lacking)} not found: apt-get install slurm-wlm munge")
    if os.getuid() != 0:
        sys.exit("slurmctld and its nodes have to be started by root here")
    prove("slurm", directory, partial(slurm, count=NODES), PLACEMENT)


if __name__ == "__main__":
    main()
