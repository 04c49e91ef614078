"""`python -m tests.agents`: three agents of other people's SDKs are trained, one after another,
each in a run of its own. Prints a row each. Exit code 1 if one has not learned, or a call was lost.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from streamrl.run.monitoring.show_status import output_width
from tests.agents.account import Account
from tests.agents.practice import AGENTS, MISMATCH, trained


@click.command()
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=Path("runs/agents"))
@click.argument("agents", nargs=-1, type=click.Choice(AGENTS))
def main(directory: Path, agents: tuple[str, ...]) -> None:
    """Train the AGENTS, all of them by default."""
    console = Console(width=output_width())
    rows = dict[str, Account]()
    for agent in agents or AGENTS:
        rows[agent] = trained(agent, directory / agent)
        console.print(f"{agent}: {rows[agent]}")
    console.print(table(rows))
    bad = [row for row in rows.values() if not row.is_clean or row.mismatch > MISMATCH]
    sys.exit(1 if bad else 0)


def table(rows: dict[str, Account]) -> Table:
    made = Table("agent", "start", "end", "sessions", "calls", "lost", "doubled", "mismatch")
    made.add_column("audit")
    made.add_column("replay")
    for agent, row in rows.items():
        made.add_row(
            agent,
            f"{row.start:.2f}",
            f"{row.end:.2f}",
            f"{row.sessions:,}",
            f"{row.calls:,}",
            str(row.lost),
            str(row.doubled),
            f"{row.mismatch:.1e}",
            "balanced" if row.is_balanced else "NOT BALANCED",
            "identical" if row.is_identical else "DIFFERENT",
        )
    return made


main()
