"""Packing puts the sequences of a batch into rows of a fixed length, and divides the rows among the
learner's processes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

import numpy as np


def row_shapes(
    row_count: int, max_seq_len: int, row_lengths: Sequence[int], processes: int = 1
) -> list[tuple[int, int]]:
    """The shapes that a batch may have, (rows, tokens of a row), from the shortest rows to the
    longest, which are `row_count` of `max_seq_len` tokens. Each holds at least as many tokens as
    these, and can be divided among the processes.

    `row_lengths`: the lengths below `max_seq_len`.
    """
    shapes = list[tuple[int, int]]()
    for length in sorted(row_lengths):
        rows = -(-row_count * max_seq_len // length)
        shapes.append((-(-rows // processes) * processes, length))
    return [*shapes, (row_count, max_seq_len)]


def pack(
    lengths: np.ndarray,
    max_seq_len: int,
    row_count: int,
    processes: int = 1,
    costs: np.ndarray | None = None,
) -> np.ndarray | None:
    """The row of each sequence: (n,) int32; or None when `row_count` rows of `max_seq_len` tokens
    do not hold them.

    The longest sequence comes first. Each goes to the process that has the least to do so far (LPT;
    Graham 1969, "Bounds on multiprocessing timing anomalies") and has room for it, and there into
    the tightest row (best fit decreasing). So every process has one of the longest before any has
    two. Process i has the rows from i * row_count / processes on.

    `lengths`: (n,) int, tokens of each sequence. `costs`: (n,) float, what each sequence costs its
    process; by default its tokens. Raises ValueError for a sequence that is longer than a row.
    """
    if len(lengths) and int(lengths.max()) > max_seq_len:
        longest = int(lengths.argmax())
        raise ValueError(
            f"rollout {longest} has {int(lengths.max())} tokens; a row holds {max_seq_len}"
        )
    rows = np.empty(len(lengths), np.int32)
    rows_per_process = row_count // processes
    bins = [
        RowBins(max_seq_len, range(i * rows_per_process, (i + 1) * rows_per_process))
        for i in range(processes)
    ]
    queue = [(0.0, i) for i in range(processes)]  # a heap: (cost so far, process)
    tokens = lengths.tolist()
    cost = (lengths if costs is None else costs).tolist()
    for index in np.argsort(-lengths, kind="stable").tolist():
        full = list[tuple[float, int]]()  # processes without room for this sequence
        while (row := bins[queue[0][1]].place(tokens[index])) is None:
            full.append(heappop(queue))
            if not queue:
                return None
        rows[index] = row
        cost_so_far, process = queue[0]
        heapreplace(queue, (cost_so_far + cost[index], process))
        for other in full:  # they may have room for the next one
            heappush(queue, other)
    return rows


class RowBins:
    """Rows of `max_seq_len` tokens that fill up."""

    def __init__(self, max_seq_len: int, rows: range) -> None:
        self._max_seq_len = max_seq_len
        self._empty = iter(rows)
        # (free tokens, row), sorted: the tightest row that fits is found by bisection
        self._free: list[tuple[int, int]] = []

    def place(self, length: int) -> int | None:
        """Put `length` tokens into the tightest row that has them free. Returns the row, or None if
        there is none.
        """
        position = bisect_left(self._free, (length, -1))
        if position < len(self._free):
            space, row = self._free.pop(position)
        else:
            space = self._max_seq_len
            row = next(self._empty, None)
        if row is not None and space > length:
            insort(self._free, (space - length, row))
        return row
