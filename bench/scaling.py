"""How the data path scales: one thing is varied at a time, its lines stand on one broker and are measured in turns.

    python -m bench.scaling [--curve envs --curve partitions ...] [--rounds 2] [--seconds 3]

Writes bench/results/scaling.json and docs/images/scaling.png. bench/README.md says how and why.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from rich.console import Console
from rich.table import Table

from bench.lines import Line, Place
from bench.measure import RESULTS, quantile, write
from bench.work import Shape

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend has to be chosen first

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"
WARM_BROKER_S = 15.0
WARM_LINE_S = 3.0
BATCH_TOKENS = Shape().batch * Shape().rollout_tokens
FULL_S = 120.0  # at most, until the first batch


class Curve(NamedTuple):
    """What is varied, over which values, and the line that stands for one of them."""

    title: str
    unit: str
    points: Sequence[int]
    line: Callable[[Place, str, int], tuple[Line, Shape]]
    per_token: bool = False  # what is to stay the same is tokens/s


def standard(place: Place, name: str, shape: Shape | None = None, **kinds: int) -> tuple[Line, Shape]:
    shape = shape or Shape()
    return place.ours(name, shape, **kinds), shape


def of_length(place: Place, name: str, response: int) -> tuple[Line, Shape]:
    """Batches of as many tokens as the standard ones have."""
    group = Shape().group
    tokens = Shape().prompt + response
    return standard(place, name, Shape(response=response, batch=max(BATCH_TOKENS // tokens // group, 1) * group))


CURVES = {
    "envs": Curve("envs, the same load in all", "envs", (1, 3, 10, 30), lambda place, name, n: standard(place, name, envs=n)),
    "partitions": Curve("partitions of each env's topics", "partitions", (1, 4, 16), lambda place, name, n: standard(place, name, partitions=n)),
    "window": Curve(
        "rollouts that wait in the buffer",
        "rollouts",
        (1_000, 10_000, 100_000),
        lambda place, name, n: standard(place, name, Shape(stragglers=n)),
    ),
    "length": Curve("tokens of a response", "tokens", (128, 512, 2_048, 8_192, 32_768), of_length, per_token=True),
    "group": Curve(
        "rollouts of a group", "rollouts", (2, 4, 8, 16, 64), lambda place, name, n: standard(place, name, Shape(group=n, batch=max(128, 4 * n)))
    ),
    "learners": Curve("learners of the same batches", "learners", (1, 2, 4), lambda place, name, n: standard(place, name, followers=n - 1)),
}


def measure(curve: Curve, name: str, rounds: int, seconds: float, directory: Path) -> list[dict[str, Any]]:
    """A row for each point: rates of its rounds, CPU and peak memory by station."""
    with ExitStack() as stack:
        place = Place(directory, stack)
        lines: dict[int, tuple[Line, Shape]] = {}
        for point in curve.points:
            lines[point] = curve.line(place, f"{name}-{point}", point)
            line = lines[point][0]
            fill(line)
            line.run(WARM_LINE_S if lines.keys() - {point} else WARM_BROKER_S)
            line.halt()
        results: dict[int, list[dict[str, Any]]] = {point: [] for point in lines}
        for _ in range(rounds):
            for point, (line, _) in lines.items():
                results[point].append(line.run(seconds))
                line.halt()
        return [row(curve, point, shape, line, results[point]) for point, (line, shape) in lines.items()]


def row(curve: Curve, point: int, shape: Shape, line: Line, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a line did in its rounds."""
    rates, cpu = [result["rollouts_per_s"] for result in results], [result["cpu_ms"] for result in results]
    return {
        curve.unit: point,
        "rollouts_per_s": quantile(rates, 0.5),
        "tokens_per_s": quantile(rates, 0.5) * shape.rollout_tokens,
        "rounds": [round(rate, 1) for rate in rates],
        "cpu_ms_per_rollout": {station: quantile([ms[station] for ms in cpu], 0.5) for station in cpu[0]},
        "peak_rss_mb": line.peaks_mb(),
    }


def fill(line: Line) -> None:
    """Wait for the first batch: parts with many topics start slowly, and the generator sends the stragglers before anything else."""
    line.go(None)
    deadline = time.monotonic() + FULL_S
    while not line.count.get():
        line.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"bench: no batch within {FULL_S:.0f} s")
        time.sleep(0.2)


def relative(curve: Curve, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Each point's rate over that of the first; where sequences get longer, tokens count."""
    key = "tokens_per_s" if curve.per_token else "rollouts_per_s"
    return [row[key] / rows[0][key] for row in rows]


def table(found: dict[str, list[dict[str, Any]]]) -> Table:
    shown = Table("", "", "rollouts/s", "tokens/s", "to the first", "own CPU, ms", "buffer, MiB", box=None, header_style="bold")
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, rows in found.items():
        for row, share in zip(rows, relative(CURVES[name], rows), strict=True):
            first, own = row is rows[0], sum(ms for station, ms in row["cpu_ms_per_rollout"].items() if station != "broker")
            cells = (f"{row['rollouts_per_s']:,.0f}", f"{row['tokens_per_s'] / 1e6:.1f} M", f"{share:.2f}", f"{own:.3f}")
            shown.add_row(CURVES[name].title if first else "", f"{row[CURVES[name].unit]:,}", *cells, f"{row['peak_rss_mb']['buffer']:,.0f}")
    return shown


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A panel a curve: the rate over that of the first point; beside it, for the window, the buffer's memory."""
    figure, panels = plt.subplots(2, 3, figsize=(11, 6), constrained_layout=True)
    for panel, (name, rows) in zip(panels.flat, found.items(), strict=False):
        curve, points = CURVES[name], [row[CURVES[name].unit] for row in rows]
        panel.plot(points, relative(curve, rows), "o-", color="#1b6ca8")
        panel.set_xscale("log", base=2 if points[-1] <= 64 else 10)
        panel.set_xticks(points, [f"{point:,}" for point in points])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_title(curve.title, fontsize=10)
        panel.set_ylabel("tokens/s to the first" if curve.per_token else "rate to the first", fontsize=9)
        panel.grid(alpha=0.25)
        if name == "window":
            memory = panel.twinx()
            memory.plot(points, [row["peak_rss_mb"]["buffer"] for row in rows], "s--", color="#c8553d")
            memory.set_ylabel("memory of the buffer, MiB (dashed)", fontsize=9, color="#c8553d")
            memory.set_ylim(bottom=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curve", action="append", choices=CURVES, help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round, after a second to get going")
    options = parser.parse_args()
    chosen, path = options.curve or list(CURVES), RESULTS / "scaling.json"
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["curves"] if path.exists() else {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as directory:
            found[name] = measure(CURVES[name], name, options.rounds, options.seconds, Path(directory))
    found = {name: found[name] for name in CURVES if name in found}
    Console().print(table(found))
    draw(found, PICTURE)
    write(path, {"curves": found, "command": f"python -m bench.scaling --rounds {options.rounds} --seconds {options.seconds:g}"})


if __name__ == "__main__":
    main()
