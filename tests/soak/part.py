"""One process of a soak run: `python -m tests.soak.part RUN.yaml NAME`. Buffer and batcher are the commands that everybody runs."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.soak.clock import Clock, follow

CLOCK = "clock"  # file in the run's directory


def main(file: str, name: str) -> None:
    follow(Clock(Path(file).parent / CLOCK))
    from streamrl import cli
    from tests.soak import learner, producers

    if name in ("buffer", "batcher"):
        sys.argv[1:] = [name, file]
        cli.main()
    elif name == "learner":
        stand_in(file, learner.main)
    else:
        stand_in(file, producers.main, int(name.rpartition("-")[2]))


def stand_in(file: str, main: object, *arguments: object) -> None:
    """Ends as `streamrl` does."""
    import click

    from streamrl import cli

    cli.Commands(commands=[click.Command("part", callback=lambda: cli._be(file, main, *arguments))])(["part"], prog_name="streamrl")  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
