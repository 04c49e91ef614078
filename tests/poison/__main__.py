"""`python -m tests.poison`: the table of poison. Exit code 1 when a part ended, or a record did not
end as it must.
"""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.poison.table import rows


def main() -> None:
    logging.getLogger().addHandler(logging.NullHandler())
    table = Table("poison", "where", "read by", "its end", "", box=None, header_style="bold")
    failed = 0
    for _, run in rows():
        row = run()
        failed += bool(row.wrong)
        held = f"[bold red]FAILED[/] {escape(row.wrong)}" if row.wrong else "[green]held[/]"
        table.add_row(escape(row.poison), row.topic, row.parts, escape(row.end[:90]), held)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    console.print(
        f"{table.row_count} poisons, {failed} of them ended a part, or did not end as they must"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
