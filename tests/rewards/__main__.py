"""`python -m tests.rewards [REWARD ...]`: what answers as models write them earn. Exit code 1 if
one earns what it must not.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.rewards.tables import REWARD_TABLES, earned, is_as_wanted, rows_of


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    wrong = 0
    count = 0
    for name in sys.argv[1:] or REWARD_TABLES:
        table = Table("row", "answer", "earned", "", box=None, header_style="bold", title=name)
        rows = rows_of(name)
        with tempfile.TemporaryDirectory() as directory:
            rewards = asyncio.run(earned(name, rows, Path(directory)))
        for row, reward in zip(rows, rewards, strict=True):
            is_fine = is_as_wanted(name, row, reward)
            wrong += not is_fine
            count += 1
            shown = "no reward" if reward is None else f"{reward:g}"
            fields = "  ".join(repr(field) for field in row.fields)
            verdict = "" if is_fine else "[bold red]WRONG[/]"
            table.add_row(row.group, escape(fields[:110]), shown, verdict)
        console.print(table)
    console.print(f"{count} answers, {wrong} of them judged wrongly")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
