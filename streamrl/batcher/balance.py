"""What a sequence costs the process that trains on it. The processes' shares of a batch are
balanced by it.

Each function is pure and maps `lengths`: (n,) int, tokens of each sequence with its prompt, and
`hidden`, the hidden size of the model, to costs: (n,) float64. Only their ratios matter. A function
that is not shipped is named in the run file as MODULE:FUNCTION.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from streamrl.config.plugins import import_path
from streamrl.stream.records import Batch

Cost = Callable[[np.ndarray, int], np.ndarray]


def tokens(lengths: np.ndarray, hidden: int) -> np.ndarray:
    """s: the memory, and the time of a model whose attention does not count."""
    return lengths.astype(np.float64)


def flops(lengths: np.ndarray, hidden: int) -> np.ndarray:
    """s (6 d + s): the FLOPs of a step over s tokens, without the factor 12 L d that all sequences
    have in common.

    The weights take 6 N s (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; N = 12 L d^2 by its
    equation 2.1) and the attention takes 12 L d s^2 (PaLM, arXiv:2204.02311, appendix B). At s = 6
    d the attention costs as much as the weights.
    """
    exact = tokens(lengths, hidden)
    return exact * (6.0 * hidden + exact)


COSTS: dict[str, Cost] = {"tokens": tokens, "flops": flops}


def cost_named(name: str) -> Cost:
    """The shipped cost of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return COSTS.get(name) or import_path(name, "batcher.balance", COSTS)


def costs_of(lengths: np.ndarray, name: str, hidden: int) -> np.ndarray:
    """(n,) float64: the cost named `name` of these lengths. Raises ValueError when it does not give
    n finite numbers of at least 0.
    """
    costs = np.asarray(cost_named(name)(lengths, hidden), np.float64)
    if costs.shape != lengths.shape or not np.isfinite(costs).all() or (costs < 0).any():
        raise ValueError(
            f"batcher.balance {name} returned {costs!r}, "
            f"expected {len(lengths)} finite numbers of at least 0"
        )
    return costs


def loads(batch: Batch, costs: np.ndarray) -> np.ndarray:
    """(processes,) float64: the costs of each process's share. `costs`: (n,), one a sequence."""
    rows_per_process = batch.row_count // batch.processes
    processes = batch.rows // rows_per_process
    return np.bincount(processes, weights=costs, minlength=batch.processes)


def imbalance(shares: np.ndarray) -> float:
    """1 - mean / max. If cost is time, it is the part of a step that the processes wait for the one
    with most to do. 0: all have the same.

    `shares`: (processes,) float.
    """
    largest = float(shares.max())
    return 1.0 - float(shares.mean()) / largest if largest > 0 else 0.0
