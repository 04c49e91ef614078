"""`python -m tests.chaos_cluster`: 21 kills of brokers and five other faults, and what they cost a
run next to plain transactional producers. Exit code 1 when something was lost, doubled or
different, or when a part was slower than the producers by more than 3 s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from streamrl.config.topology import BATCHES, POLICY_VERSIONS, journal
from tests.chaos.__main__ import interrupt
from tests.chaos.harness import Stuck
from tests.chaos_cluster.harness import PARTS, Harness, Row, at_work
from tests.chaos_cluster.known import QUIZ, TALK
from tests.chaos_cluster.report import as_json, misses, outcome, table

TOPICS = (
    journal("buffer"),
    journal("batcher"),
    journal(f"env-{TALK}-0"),
    journal(f"env-{QUIZ}-0"),
    BATCHES,
    POLICY_VERSIONS,
)
STOPPED = TOPICS[:2]
Fault = Callable[[Harness], Row]


def faults() -> dict[str, list[Fault]]:
    """All faults, by the name that `--only` takes."""
    return {
        "none": [Harness.nothing],
        "rolling": [Harness.rolling_restart] * 2,
        "leader": [lambda harness, topic=topic: harness.kill_leader(topic) for topic in TOPICS],
        "controller": [Harness.kill_controller] * 5,
        "stop": [
            lambda harness, topic=topic: harness.suspend_leader(topic) for topic in TOPICS[:2]
        ],
        "quota": [Harness.quota],
        "disk": [Harness.full_disk],
        "two": [Harness.kill_two] * 2,
        "all": [Harness.kill_all] * 2,
        "part": [lambda harness, name=name: harness.kill_part(name) for name in PARTS],
        "long": [lambda harness: harness.kill_for_long(journal("buffer"))],
    }


@click.command()
@click.option("--only", multiple=True, help="A kind of faults; may be given several times.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("runs/chaos-cluster"),
    show_default=True,
)
def main(only: tuple[str, ...], directory: Path) -> None:
    """Do harm to the brokers under a run, and account for every rollout. Ctrl-C ends it early."""
    logging.getLogger().addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, interrupt)
    if unknown := sorted(set(only) - faults().keys()):
        raise click.UsageError(f"--only {unknown[0]}: give one of {', '.join(faults())}")
    console = Console(width=200)
    chosen = [fault for kind in only or faults() for fault in faults()[kind]]
    directory = directory.absolute()
    shutil.rmtree(directory, ignore_errors=True)
    try:
        with at_work(directory) as harness:
            with contextlib.suppress(KeyboardInterrupt):  # the account is made of what was done
                for fault in chosen:
                    print(json.dumps(asdict(fault(harness))), file=sys.stderr, flush=True)
            harness.drain()
            found = outcome(harness.log, harness.run)
            rows = harness.rows
    except Stuck as error:
        sys.exit(f"{error}; see {directory / 'run' / 'logs'}")
    (directory / "chaos-cluster.json").write_text(json.dumps(as_json(rows, found), indent=1))
    console.print(table(rows, found))
    console.print(f"{sum(row.kills for row in rows)} kills; {found}")
    missed = misses(rows, found)
    console.print("\n".join(missed) or "every row holds")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
