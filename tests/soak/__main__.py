"""`python -m tests.soak`: half an hour of a hundred producers, and what came of it. Exit code 1
when something was lost, grew or stood still.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from streamrl.extensions.recordings.progress import progress_bar
from streamrl.run.monitoring.show_status import output_width
from tests.chaos.__main__ import interrupt
from tests.chaos.harness import Stuck
from tests.soak import known
from tests.soak.harness import soaked
from tests.soak.report import report, show
from tests.soak.verdict import verdict


@click.command()
@click.option(
    "--minutes",
    type=click.FloatRange(0.5),
    default=30.0,
    show_default=True,
    help="Of production; start, end and account come on top.",
)
@click.option("--envs", type=click.IntRange(8), default=100, show_default=True, help="Producers.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("runs/soak"),
    show_default=True,
    help="Of the run.",
)
def main(minutes: float, envs: int, directory: Path) -> None:
    """Let a run go on for long while things go wrong, then account for everything."""
    # ends are expected here; the parts have logs of their own
    logging.getLogger().addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, interrupt)
    run = known.run_file(directory.absolute(), envs)
    try:
        with (
            progress_bar(f"soak, {minutes:g} min", Console(stderr=True)) as progress,
            soaked(run, minutes * 60, progress) as (soak, log),
        ):
            # for whoever asks again what the account leaves out
            (run.directory / "seen.json").write_text(json.dumps(asdict(soak.seen)))
            said = report(run, soak.seen, soak.steps(), verdict(log, run))
    except Stuck as error:
        sys.exit(f"soak: {error}; see {run.directory / 'logs'}")
    (run.directory / "soak.json").write_text(json.dumps(said, indent=1) + "\n")
    show(said, Console(width=output_width()))
    sys.exit(0 if said["passed"] else 1)


if __name__ == "__main__":
    main()
