"""Prints the result of `streamrl audit --scorer`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.audit_scorer import ScorerAudit, audit_scorer
from streamrl.extensions.recordings.new_rewards import ScorerVersion
from streamrl.run.monitoring.cells import quoted
from streamrl.stream.log.protocol import Log


def show_scorer(run: RunFile, log: Log, scorer: ScorerVersion, console: Console) -> None:
    """Print which rollouts, batches and policy versions had rewards of a scorer."""
    result = audit_scorer(log, run, scorer)
    console.print(env_table(result))
    if result.batches:
        console.print(batch_table(result))
    touched = sum(count.touched for count in result.envs.values())
    versions = result.versions
    console.print(
        f"{scorer} touched {touched:,} rollouts, {len(result.batches):,} batches and"
        f" {len(versions):,} policy versions",
        highlight=False,
        markup=False,
    )
    if versions:
        console.print(
            f"version {min(versions)} is the first of them, and all later ones descend from it",
            highlight=False,
        )


def env_table(result: ScorerAudit) -> Table:
    """A row for each env."""
    table = Table("env", "published", "touched", "failed by it", "rescored only", box=None)
    table.header_style = "bold"
    for column in table.columns[1:]:
        column.justify = "right"
    for env, count in result.envs.items():
        numbers = (count.published, count.touched, count.failed, count.unused)
        table.add_row(quoted(env), *(f"{number:,}" for number in numbers))
    return table


def batch_table(result: ScorerAudit) -> Table:
    """A row for each batch that has touched rollouts."""
    table = Table("batch", "rollouts", "touched", "gave version", box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for share in result.batches:
        version = "-" if share.version is None else str(share.version)
        table.add_row(str(share.batch), f"{share.rollouts:,}", f"{share.touched:,}", version)
    return table
