"""What is said about a soak: tables for people, soak.json for programs. docs/reliability.md
describes the run.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrl.config.run_file import RunFile
from tests.chaos.report import in_words
from tests.soak.clock import STEP_S
from tests.soak.harness import MEMORY_SINCE, Seen
from tests.soak.memory import cores, memory
from tests.soak.pauses import PAUSE_S, pauses
from tests.soak.verdict import Soaked

# of a clock that was set by an hour between two entries that lie some seconds apart
LEAST_STEP_S = 0.97 * STEP_S


def report(run: RunFile, seen: Seen, steps: list[float], found: Soaked) -> dict[str, Any]:
    """The contents of soak.json. `steps`: when each batch came, monotonic."""
    during = [
        time_s for time_s in steps if seen.started_s <= time_s <= seen.started_s + seen.seconds
    ]
    gaps = pauses(during, seen.incidents)
    since_s = seen.seconds * MEMORY_SINCE
    memories = [
        memory(seen.samples, name, since_s)._asdict()
        for name in dict.fromkeys(sample.process for sample in seen.samples)
    ]
    forward_s, back_s = found.clock_steps_s
    said = {
        "minutes": round(seen.seconds / 60, 1),
        "producers": len(run.envs),
        "cores_used": round(cores(seen.samples), 2),
        "rollouts": found.rollouts,
        "rollouts_per_s": round(found.rollouts / seen.seconds, 1),
        "batches": found.batches,
        "fates": dict(found.fates.most_common()),
        "in_flight": found.in_flight,
        "good_without_one_fate": found.good_without_one_fate + found.without_fate + found.two_fates,
        "lost": found.lost,
        "trained_twice": found.trained_twice,
        "rubbish": found.rubbish,
        "rubbish_dead_lettered": found.dead_lettered,
        "rubbish_not_dead_lettered": found.rubbish_not_dead_lettered + found.letters_astray,
        "audit_balanced": found.audit_balanced,
        "batches_identical": found.batches_identical,
        "weights_astray": found.weights_astray,
        "wrong": found.wrong,
        "faults": found.faults,
        "broker_kills": sum(one.what == "broker killed" for one in seen.incidents),
        "full_disk": "a tmpfs of its own" if seen.own_disk else "/dev/full",
        "learner_said": seen.said.partition("streamrl: ")[2] or seen.said,
        "clock_steps_s": [round(forward_s), round(back_s)],
        "ends": {
            name: in_words({f"exit {code}": count for code, count in Counter(codes).items()})
            for name, codes in sorted(seen.ends.items())
        },
        "pauses": [
            {
                **gap._asdict(),
                "start_s": round(gap.start_s - seen.started_s, 1),
                "seconds": round(gap.seconds, 1),
            }
            for gap in gaps
        ],
        "longest_pause_unexplained_s": round(
            max((gap.seconds for gap in gaps if not gap.cause), default=0.0), 1
        ),
        "longest_between_batches_s": round(
            max((b - a for a, b in pairwise(during) if b - a <= PAUSE_S), default=0.0), 1
        ),
        "memory": memories,
        "memory_flat": all(one["flat"] for one in memories),
    }
    clock = forward_s > LEAST_STEP_S and back_s < -LEAST_STEP_S
    said["accounts_clean"] = found.clean and clock and bool(seen.said)
    said["passed"] = (
        said["accounts_clean"] and said["memory_flat"] and not said["longest_pause_unexplained_s"]
    )
    return said


def show(said: dict[str, Any], console: Console) -> None:
    """Three tables: the account, the memory of each process, the pauses."""
    account = Table("soak", "", box=None, header_style="bold", title_justify="left")
    for name, value in said.items():
        if name not in ("memory", "pauses", "ends"):
            account.add_row(name.replace("_", " "), in_words(value))
    console.print(account)
    console.print()
    sizes = Table(
        "memory, last two thirds",
        "first MiB",
        "last MiB",
        "slope MiB/h",
        "flat",
        box=None,
        header_style="bold",
    )
    for one in said["memory"]:
        sizes.add_row(
            one["process"],
            f"{one['first_mib']:.1f}",
            f"{one['last_mib']:.1f}",
            f"{one['slope_mib_per_h']:+.2f}",
            in_words(one["flat"]),
        )
    console.print(sizes)
    console.print()
    gaps = Table("pause over 5 s, at", "length s", "because of", box=None, header_style="bold")
    for gap in said["pauses"]:
        gaps.add_row(
            f"{gap['start_s']:.0f} s",
            f"{gap['seconds']:.1f}",
            gap["cause"] or "[bold red]nothing[/]",
        )
    console.print(gaps)
    console.print()
    ends = Table("ended by itself", "how, times", box=None, header_style="bold")
    for name, how in said["ends"].items():
        ends.add_row(name, how)
    console.print(ends)
