"""Packing: how full the rows are, how evenly processes share them, and how fast that is, against a
plain first fit decreasing.

    python -m bench.packing [--rollouts 4096] [--row 8192] [--draws 5] ...

Lengths are log-normal (median 700, sigma 1), clipped at the row. The exit code is 1 when less than
`LEAST_FILLED` of the positions are used, or fewer than `LEAST_RATE` rollouts packed in a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.measure import RESULTS, spread, write
from bench.work import joined_group
from streamrl.batcher.balance import COSTS, flops, imbalance, tokens
from streamrl.batcher.packing import pack
from streamrl.batcher.process import step
from streamrl.batcher.state import BatcherConfig, BatcherState
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Fate, Metric, PolicyVersion

# of the lengths, in tokens
MEDIAN = 700
SIGMA = 1.0
LEAST_FILLED = 0.99
LEAST_RATE = 50_000
HIDDEN = 4096  # of the model that FLOPs are those of
GROUP = 8  # rollouts a problem
NOTHING = np.zeros(0, np.uint16)  # a prompt: what is in a group costs nothing to pack
BATCHES = 3  # that the batcher makes

Packer = Callable[[np.ndarray, int], np.ndarray]


def first_fit_decreasing(lengths: np.ndarray, max_seq_len: int) -> np.ndarray:
    """The row of each, as the textbook has it: longest first, each into the first row that has
    room.
    """
    rows = np.empty(len(lengths), np.int32)
    free = list[int]()
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = int(lengths[index])
        row = next((row for row, space in enumerate(free) if space >= length), len(free))
        if row == len(free):
            free.append(max_seq_len)
        free[row] -= length
        rows[index] = row
    return rows


def ours(lengths: np.ndarray, max_seq_len: int) -> np.ndarray:
    """With as many rows as it likes."""
    rows = pack(lengths, max_seq_len, len(lengths))
    assert rows is not None
    return rows


def draw(rollouts: int, row: int, seed: int) -> np.ndarray:
    """(rollouts,) int: lengths in tokens."""
    return np.clip(
        np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, rollouts).astype(np.int64),
        1,
        row,
    )


def measure_packers(draws: list[np.ndarray], row: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Share of positions used, and rollouts/s; the packers in turns, so that each sees the same
    machine.
    """
    packers: dict[str, Packer] = {"ours": ours, "first fit decreasing": first_fit_decreasing}
    rates, filled, over = ({name: list[float]() for name in packers} for _ in range(3))
    for lengths in draws:
        for _ in range(repeats):
            for name, packer in packers.items():
                started = time.perf_counter()
                packer(lengths, row)
                rates[name].append(len(lengths) / (time.perf_counter() - started))
        for name, packer in packers.items():
            used = int(packer(lengths, row).max()) + 1
            total = int(lengths.sum())
            filled[name].append(total / (used * row))
            over[name].append(used - -(-total // row))
    return {
        name: {
            "filled_frac": spread(filled[name]),
            "rows_over_the_bound": max(over[name]),
            "rollouts_per_s": spread(rates[name]),
        }
        for name in packers
    }


def measure_division(
    draws: list[np.ndarray], row: int, processes: int, balance: str
) -> dict[str, Any]:
    """Positions used and imbalance, in as few rows as the processes can have; beside it what the
    rows of the tightest packing give, cut evenly.
    """
    found: dict[str, list[float]] = {
        "filled_frac": [],
        "tokens": [],
        "flops": [],
        "undivided_flops": [],
        "rollouts_per_s": [],
    }
    for lengths in draws:
        costs = COSTS[balance](lengths, HIDDEN)
        tight = ours(lengths, row)
        of_each = -(-int(tight.max() + 1) // processes)
        started = time.perf_counter()
        while (rows := pack(lengths, row, of_each * processes, processes, costs)) is None:
            of_each += 1
        found["rollouts_per_s"].append(len(lengths) / (time.perf_counter() - started))
        found["filled_frac"].append(float(lengths.sum()) / (of_each * processes * row))
        for name, cost in (("tokens", tokens), ("flops", flops)):
            found[name].append(
                imbalance(
                    np.bincount(rows // of_each, weights=cost(lengths, HIDDEN), minlength=processes)
                )
            )
        found["undivided_flops"].append(
            imbalance(
                np.bincount(tight // of_each, weights=flops(lengths, HIDDEN), minlength=processes)
            )
        )
    return {name: spread(values) for name, values in found.items()}


def measure_batches(rollouts: int, row: int, processes: int) -> dict[str, Any]:
    """The batcher itself, a record a step: batches that may fill all their rows, of groups that are
    more than enough; what its own metrics say.
    """
    lengths = draw((BATCHES + 1) * rollouts, row, seed=100)
    row_count = int(lengths.sum()) // (BATCHES + 1) // row // processes * processes
    config = BatcherConfig(
        fractions={"bench": 1.0},
        learner="lead",
        total_token_budget=row_count * row,
        max_seq_len=row,
        row_count=row_count,
        max_age=BATCHES,
        lookahead=0,
        spill=False,
        max_window_tokens=2 * int(lengths.sum()),
        processes=processes,
        balance="flops",
        hidden=HIDDEN,
    )
    state = BatcherState()
    values = list[dict[str, float]]()
    packed = 0
    building_s = 0.0
    parts = np.array_split(lengths, len(lengths) // GROUP)
    groups = (
        joined_group(f"g{i}", part, NOTHING, np.zeros(int(part.sum()), np.uint16))
        for i, part in enumerate(parts)
    )
    held = [Event("groups.bench", 0, i, group.group_id, group) for i, group in enumerate(groups)]
    state, _ = step(config, state, held, 0.0)
    for number in range(BATCHES):
        announced = PolicyVersion(learner="lead", version=number, uri="", size_bytes=0, sha256="")
        started = time.perf_counter()
        state, outputs = step(
            config, state, [Event("policy-versions", 0, number, "lead", announced)], 0.0
        )
        building_s += time.perf_counter() - started
        packed += sum(
            len(o.record.uids)
            for o in outputs
            if isinstance(o.record, Fate) and o.record.fate == "batched"
        )
        values += [output.record.values for output in outputs if isinstance(output.record, Metric)]
    assert len(values) == BATCHES, "each version has its batch"
    named = {
        "padding_frac": "padding_frac",
        "imbalance_frac": "imbalance_frac",
        "tokens": "token_imbalance_frac",
    }
    return {
        **{
            name: spread([v[f"batcher/{metric}"] for v in values]) for name, metric in named.items()
        },
        "rollouts_per_s": packed / building_s,
    }


def tables(results: dict[str, Any]) -> list[Table]:
    packers = Table(
        "",
        "positions used",
        "worst draw",
        "over the bound",
        "rollouts/s",
        box=None,
        title="rollouts to rows",
        title_justify="left",
    )
    for name, r in results["packers"].items():
        filled = r["filled_frac"]
        packers.add_row(
            name,
            f"{filled['median']:.2%}",
            f"{filled['min']:.2%}",
            str(r["rows_over_the_bound"]),
            f"{r['rollouts_per_s']['median']:,.0f}",
        )
    columns = (
        "processes",
        "balanced by",
        "positions used",
        "imbalance: tokens",
        "FLOPs",
        "FLOPs, undivided",
        "rollouts/s",
    )
    division = Table(*columns, box=None, title="among processes", title_justify="left")
    for r in results["division"]:
        shown = [f"{r[name]['median']:.3%}" for name in ("tokens", "flops", "undivided_flops")]
        division.add_row(
            str(r["processes"]),
            r["balance"],
            f"{r['filled_frac']['median']:.2%}",
            *shown,
            f"{r['rollouts_per_s']['median']:,.0f}",
        )
    columns = ("processes", "padding", "imbalance: tokens", "FLOPs", "rollouts/s")
    batches = Table(
        *columns,
        box=None,
        title="batches of the batcher, as its metrics have them (balanced by FLOPs)",
        title_justify="left",
    )
    for r in results["batches"]:
        shown = [f"{r[name]['max']:.3%}" for name in ("padding_frac", "tokens", "imbalance_frac")]
        batches.add_row(str(r["processes"]), *shown, f"{r['rollouts_per_s']:,.0f}")
    return [packers, division, batches]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=4096, help="of a batch")
    parser.add_argument("--row", type=int, default=8192, help="tokens")
    parser.add_argument("--draws", type=int, default=5, help="of lengths")
    parser.add_argument("--repeats", type=int, default=5, help="of each draw, for the rate")
    parser.add_argument(
        "--processes",
        type=int,
        action="append",
        help="may be repeated: a line each; default 2, 8, 32",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "packing.json")
    given = parser.parse_args()
    draws = [draw(given.rollouts, given.row, seed) for seed in range(given.draws)]
    counts = given.processes or [2, 8, 32]
    results: dict[str, Any] = {
        "packers": measure_packers(draws, given.row, given.repeats),
        "division": [
            {"processes": n, "balance": balance, **measure_division(draws, given.row, n, balance)}
            for n in counts
            for balance in ("tokens", "flops")
        ],
        "batches": [
            {"processes": n, **measure_batches(given.rollouts, given.row, n)} for n in (1, *counts)
        ],
    }
    for shown in tables(results):
        Console().print(shown)
        Console().print()
    command = " ".join(["python -m bench.packing", *sys.argv[1:]])
    write(given.out, {**results, "command": command})
    filled = results["packers"]["ours"]["filled_frac"]["min"]
    rate = results["packers"]["ours"]["rollouts_per_s"]["median"]
    if filled < LEAST_FILLED or rate < LEAST_RATE:
        raise SystemExit(
            f"bench: {filled:.2%} of the positions and {rate:,.0f} rollouts/s; expected"
            f" {LEAST_FILLED:.0%} and {LEAST_RATE:,}"
        )


if __name__ == "__main__":
    main()
