"""What a process cost, as the kernel counts it, and what a few numbers say together."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def peak_rss_mb(pid: int) -> float:
    """The most memory it has held, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` of them does not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as documents have it; numbers, all but the first column, to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return (
            "| "
            + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])
            + " |"
        )

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(line, (header, rule, *rows)))


def write(path: Path, results: Mapping[str, Any]) -> None:
    """As JSON, with the machine they are of."""
    machine = {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**results, "machine": machine}, indent=1) + "\n")
    print(f"written to {path}")
