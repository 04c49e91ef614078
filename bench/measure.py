"""What a process cost, as the kernel counts it, and what a few numbers say together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

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
    return {"median": quantile(values, 0.5), "min": min(values), "max": max(values)}
