"""`python -m tests.chaos`: kill a run so many times and say what came of it. Exit code 1 when
something was lost, doubled or different.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from streamrl.extensions.recordings.progress import progress_bar
from tests.chaos import known
from tests.chaos.harness import Stuck, struck
from tests.chaos.plan import plan
from tests.chaos.report import report, table
from tests.chaos.verdict import verdict


@click.command()
@click.option(
    "--kills",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Of parts and broker together.",
)
@click.option("--seed", type=int, help="Whom and when; default: drawn.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("runs/chaos"),
    show_default=True,
    help="Of the run.",
)
def main(kills: int, seed: int | None, directory: Path) -> None:
    """Kill the parts of a run and its broker, then account for every rollout."""
    # ends are expected here; the parts have logs of their own
    logging.getLogger().addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, interrupt)
    seed = random.randrange(1 << 16) if seed is None else seed
    run = known.run_file(directory.absolute())
    try:
        kills_planned = plan(kills, seed, known.parts(run))
        with (
            progress_bar(f"chaos, seed {seed}", Console(stderr=True)) as progress,
            struck(run, kills_planned, seed, progress=progress) as harness,
        ):
            said = report(seed, harness.struck, verdict(harness.log, run))
    except Stuck as error:
        sys.exit(f"chaos, seed {seed}: {error}; see {run.directory / 'logs'}")
    (run.directory / "chaos.json").write_text(json.dumps(said, indent=1) + "\n")
    Console().print(table(said))
    sys.exit(0 if said["passed"] else 1)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
