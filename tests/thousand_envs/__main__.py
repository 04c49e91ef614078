"""`python -m tests.thousand_envs`: a run of a thousand envs in one host, and what it takes. Exit
code 1 where it is slower than it has to be, or does not balance.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from streamrl.run.monitoring.show_status import output_width
from tests.thousand_envs.measured import BATCHES_AFTER_KILL, DESCRIPTORS, Measured, measure

RESTART_S = 15.0
STATUS_S = 2.0


@click.command()
@click.option("--envs", type=click.IntRange(4), default=1_000, show_default=True)
@click.option(
    "--families",
    type=click.IntRange(0),
    default=4,
    show_default=True,
    help="Of envs that share topics; 0: each env has its own.",
)
@click.option(
    "--seconds", type=click.FloatRange(1), default=30.0, show_default=True, help="Of steady work."
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("runs/thousand-envs"),
    show_default=True,
    help="Of the run.",
)
def main(envs: int, families: int, seconds: float, directory: Path) -> None:
    """Run many envs, kill the buffer, account for every rollout."""
    measured = measure(envs, families, directory.absolute(), seconds)
    console = Console(width=output_width())
    for table in tables(measured):
        console.print(table)
    sys.exit(0 if passed(measured) else 1)


def passed(measured: Measured) -> bool:
    return (
        measured.is_balanced
        and measured.is_identical
        and measured.restart_s <= RESTART_S
        and measured.status_s <= STATUS_S
    )


def tables(measured: Measured) -> list[Table]:
    figures = {
        "envs": f"{measured.envs:,}",
        "descriptors of each process but the broker": f"{DESCRIPTORS:,}",
        "topics apply": f"{measured.topics_s:.1f} s",
        "first batch after up": f"{measured.first_batch_s:.1f} s",
        "requests": f"{measured.requests_per_s:,.0f} /s",
        "rollouts": f"{measured.rollouts_per_s:,.0f} /s",
        "batches": f"{measured.batches:,}",
        "expired": f"{measured.expired_frac:.1%}",
        "share of an env (1 = even)": f"{measured.share_min:.2f} to {measured.share_max:.2f}",
        f"{BATCHES_AFTER_KILL} batches": f"{measured.batches_s:.1f} s",
        f"kill -9 of the buffer, {BATCHES_AFTER_KILL} more batches": f"{measured.restart_s:.1f} s",
        "status of the live run": f"{measured.status_s:.1f} s",
        "audit": f"{measured.audit_s:.1f} s, balanced: {measured.is_balanced}",
        "replay": f"{measured.replay_s:.1f} s, identical: {measured.is_identical}",
    }
    found = Table("what", "figure", box=None)
    for what, figure in figures.items():
        found.add_row(what, figure)
    taken = Table("part", "memory", "threads", "descriptors", "CPU", box=None)
    for part in measured.parts:
        taken.add_row(
            part.name,
            f"{part.memory_mb:,.0f} MB",
            str(part.threads),
            str(part.descriptors),
            f"{part.cpu_frac:.0%} of a core",
        )
    return [found, taken]


if __name__ == "__main__":
    main()
