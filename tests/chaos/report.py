"""What is said about a chaos run: a table for people, chaos.json for programs. docs/reliability.md
describes the run.
"""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from streamrl.run.orchestrator.plan import BROKER
from tests.chaos.harness import Struck
from tests.chaos.verdict import Verdict
from tests.support.waiting import patience

# within which every part has to commit after the broker's return
RETURN_LIMIT_S = patience(15.0)


def report(seed: int, struck: Struck, found: Verdict) -> dict[str, Any]:
    """The contents of chaos.json."""
    returns = [seconds for _, seconds in struck.returns_s]
    return {
        "kills": struck.kills_by_role.total(),
        "kills_by_role": {
            role: count for role, count in sorted(struck.kills_by_role.items()) if role != BROKER
        },
        "broker_kills": struck.kills_by_role[BROKER],
        "kills_in_open_transaction": struck.inside.total(),
        "open_transaction_kills_by_role": dict(sorted(struck.inside.items())),
        "rollouts": found.rollouts,
        "groups": found.groups,
        "batches": found.batches,
        "versions": found.versions,
        "in_flight": found.in_flight,
        "lost": found.lost,
        "trained_twice": found.trained_twice,
        "two_fates": found.two_fates,
        "without_fate": found.without_fate,
        "audit_balanced": found.audit_balanced,
        "batches_identical": found.batches_identical,
        "wrong": found.wrong,
        "faults": found.faults,
        "commit_after_kill_s": spread(struck.restarts_s),
        "commit_after_broker_return_s": spread(returns),
        "seed": seed,
        "seconds": round(struck.seconds, 1),
        "passed": found.clean and max(returns, default=0.0) <= RETURN_LIMIT_S,
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and largest."""
    return (
        {
            "count": len(seconds),
            "median": round(statistics.median(seconds), 2),
            "max": round(max(seconds), 2),
        }
        if seconds
        else {}
    )


def table(said: dict[str, Any]) -> Table:
    made = Table("chaos", "", box=None, header_style="bold", title_justify="left")
    made.columns[1].justify = "right"
    for name, value in said.items():
        made.add_row(name.replace("_", " "), in_words(value))
    return made


def in_words(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "[bold red]no[/]"
        case dict():
            return ", ".join(f"{name} {count}" for name, count in value.items()) or "-"
        case list():
            return "\n".join(map(str, value)) or "-"
        case int() | float():
            return f"{value:,}"
        case _:
            return str(value)
