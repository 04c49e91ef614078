"""Is a process's memory flat? From samples of its resident size: the slope is the median of the
slopes between any two, so that one that is off counts for nothing (Theil 1950; Sen 1968).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

# growth over the time looked at that is no growth: the larger of the two, the second of what the
# process has
LEAST_MIB = 6.0
SHARE = 0.05
AT_MOST = 600  # samples between which slopes are taken


class Sample(NamedTuple):
    time_s: float  # since the run began
    process: str
    pid: int
    rss_mib: float
    cpu_s: float  # user and system, since the process began


class Memory(NamedTuple):
    """What became of one process between two moments."""

    process: str
    lives: int  # processes of that name
    first_mib: float
    last_mib: float
    slope_mib_per_h: float
    growth_mib: float  # slope times the time
    flat: bool


def slope(times_s: np.ndarray, values: np.ndarray) -> float:
    """Median of (v_j - v_i) / (t_j - t_i) over all i < j. `times_s`, `values`: (n,) float64, times
    ascending, n >= 2. Sen, 1968.
    """
    i, j = np.triu_indices(len(times_s), 1)
    return float(np.median((values[j] - values[i]) / (times_s[j] - times_s[i])))


def memory(samples: Iterable[Sample], process: str, since_s: float) -> Memory:
    """Of the last process of that name, from `since_s` on. Raises ValueError when there are fewer
    than two samples of it.
    """
    mine = [sample for sample in samples if sample.process == process and sample.time_s >= since_s]
    last = [sample for sample in mine if sample.pid == mine[-1].pid]
    if len(last) < 2:
        raise ValueError(f"{process}: {len(last)} samples since {since_s:.0f} s; it takes two")
    last = last[:: -(-len(last) // AT_MOST)]
    times_s = np.array([sample.time_s for sample in last])
    sizes = np.array([sample.rss_mib for sample in last])
    per_s = slope(times_s, sizes)
    growth = per_s * float(times_s[-1] - times_s[0])
    flat = growth <= max(LEAST_MIB, SHARE * float(np.median(sizes)))
    return Memory(
        process=process,
        lives=len({sample.pid for sample in mine}),
        first_mib=last[0].rss_mib,
        last_mib=last[-1].rss_mib,
        slope_mib_per_h=per_s * 3600,
        growth_mib=growth,
        flat=flat,
    )


def cores(samples: Iterable[Sample]) -> float:
    """Processor cores that all processes together used, on average."""
    spent: dict[tuple[str, int], list[float]] = {}
    times_s: list[float] = []
    for sample in samples:
        spent.setdefault((sample.process, sample.pid), []).append(sample.cpu_s)
        times_s.append(sample.time_s)
    return sum(cpu[-1] for cpu in spent.values()) / max(times_s[-1], 1.0) if times_s else 0.0
