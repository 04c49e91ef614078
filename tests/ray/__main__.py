"""`python -m tests.ray`: a run on three nodes of a real Ray, two of which are lost in the middle.
Exit code 1 when a machine is not continued elsewhere, or the run's account does not balance.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from tests.ray.cluster import ray_cluster
from tests.support.lost_nodes import prove

NODES = 3
PLACEMENT = {
    "learner": {"nodes": ["trains"], "cpus": 2},
    "env": {"nodes": ["samples"]},
}


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("runs/ray"),
    show_default=True,
    help="Of the run; must not exist.",
)
@click.option(
    "--lose",
    multiple=True,
    default=("samples", "trains"),
    show_default=True,
    help="The machine whose node is lost; may be repeated.",
)
def main(directory: Path, lose: tuple[str, ...]) -> None:
    """Run on three nodes of a real Ray, and lose two of them."""
    prove("ray", directory, partial(ray_cluster, count=NODES), PLACEMENT, lose)


if __name__ == "__main__":
    main()
