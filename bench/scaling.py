"""How the data path scales: one thing is varied at a time. Every point has a broker of its own;
those of a curve are measured in turns.

    python -m bench.scaling [--curve envs --curve partitions ...] [--rounds 3] [--seconds 2]
    python -m bench.scaling --table       the last measurement: its table as Markdown, its picture

Writes bench/results/scaling.json and docs/images/scaling.png. bench/README.md says how and why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

from bench.lines import Line, Place
from bench.measure import RESULTS, markdown, spread, write
from bench.memory import fill_page_cache
from bench.work import Shape
from streamrl.system.errors import StreamrlError

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend has to be chosen first

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"
WARM_S = 6.0
WARM_TIMES = 5  # at most, two at least
FASTER = 1.1  # is not warm yet
BATCH_TOKENS = Shape().batch * Shape().rollout_tokens

FULL_S = 120.0  # at most, until the first batch
GENTLY = 1_000.0  # rollouts/s, while everything is done for the first time
GENTLY_S = 2.0  # behind the first batch
Row = dict[str, Any]


class Curve(NamedTuple):
    """What is varied, over which values, and what that makes of the work, and of the line
    (`Place.ours`).
    """

    title: str
    points: Sequence[int]
    shape: Callable[[int], Shape] = lambda point: Shape()
    kinds: Callable[[int], dict[str, int]] = lambda point: {}
    per_token: bool = False  # what is to stay the same is tokens/s


def of_length(response: int) -> Shape:
    """Batches of as many tokens as the standard ones have."""
    group = Shape().group
    return Shape(
        response=response,
        batch=max(BATCH_TOKENS // (Shape().prompt + response) // group, 1) * group,
    )


def of_window(rollouts: int) -> Shape:
    return Shape(stragglers=rollouts)


def of_group(rollouts: int) -> Shape:
    return Shape(group=rollouts)


CURVES = {
    "envs": Curve("envs, the same load in all", (1, 10, 30, 100), kinds=lambda n: {"envs": n}),
    "partitions": Curve(
        "partitions of each env's topics", (1, 4, 16), kinds=lambda n: {"partitions": n}
    ),
    "window": Curve("rollouts that wait in the buffer", (1_000, 10_000, 100_000), of_window),
    "length": Curve("tokens of a response", (128, 1_024, 8_192, 32_768), of_length, per_token=True),
    "group": Curve("rollouts of a group", (2, 8, 16, 64), of_group),
    "learners": Curve(
        "learners of the same batches", (1, 2, 4), kinds=lambda n: {"followers": n - 1}
    ),
}


def measure(name: str, curve: Curve, rounds: int, seconds: float, directory: Path) -> list[Row]:
    """A row for each point. One that fails says why, and the others go on."""
    lines = dict[int, Line]()
    failed = dict[int, str]()
    results: dict[int, list[Row]] = {point: [] for point in curve.points}

    def attempt(point: int, what: str, action: Callable[[], Row]) -> None:
        try:
            say(name, point, f"{what} {action()['rollouts_per_s']:,.0f} rollouts/s")
        except (SystemExit, StreamrlError) as error:
            failed[point] = str(error)
            say(name, point, f"failed: {error}")

    with ExitStack() as stack:

        def begin(point: int) -> Row:
            started = time.monotonic()
            place = Place(directory / str(point), stack, alone=True)
            lines[point] = line = place.ours(
                f"{name}-{point}", curve.shape(point), **curve.kinds(point)
            )
            fill(line)
            say(name, point, f"its first batch after {time.monotonic() - started:.1f} s")
            return warmed(line)

        def turn(point: int) -> Row:
            results[point].append(lines[point].turn(seconds))
            return results[point][-1]

        for point in curve.points:
            attempt(point, "warmed up,", lambda p=point: begin(p))
        for number in range(rounds):
            for point in curve.points:
                if point not in failed:
                    attempt(point, f"round {number + 1},", lambda p=point: turn(p))
        sound = [point for point in curve.points if point not in failed]
        peaks = {point: lines[point].peaks_mb() for point in sound}
    rows = {point: {"point": point, "failed": why} for point, why in failed.items()}
    rows |= {point: row(point, curve.shape(point), results[point], peaks[point]) for point in sound}
    return compared(
        [rows[point] for point in curve.points], "tokens_per_round" if curve.per_token else "rounds"
    )


def say(name: str, point: int, what: str) -> None:
    print(f"{name} {point:,}: {what}", flush=True)


def warmed(line: Line) -> Row:
    """What it does when it gets no faster any more; afterwards it stands still."""
    result = line.run(WARM_S)
    for _ in range(WARM_TIMES - 1):
        before = result
        result = line.run(WARM_S)
        if result["rollouts_per_s"] < FASTER * before["rollouts_per_s"]:
            break
    line.halt()
    return result


def fill(line: Line) -> None:
    """Wait for the first batch; the generator sends the stragglers before anything else. Then a
    little longer, until all partitions have been written to: the first time, the broker waits for
    the disk for each, and a transaction over hundreds of them would take too long.
    """
    line.go(GENTLY)
    deadline = time.monotonic() + FULL_S
    while not line.count.get():
        line.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"bench: no batch within {FULL_S:.0f} s: {line.tails()}")
        time.sleep(0.2)
    time.sleep(GENTLY_S)


def row(
    point: int, shape: Shape, results: Sequence[Mapping[str, Any]], peaks_mb: Mapping[str, float]
) -> Row:
    """What a line did in its rounds: rates, CPU and peak memory by station."""
    rates = [result["rollouts_per_s"] for result in results]
    return {
        "point": point,
        "rollouts_per_s": statistics.median(rates),
        "tokens_per_s": statistics.median(rates) * shape.rollout_tokens,
        "rounds": rates,
        "tokens_per_round": [rate * shape.rollout_tokens for rate in rates],
        "cpu_ms_per_rollout": {
            station: statistics.median([r["cpu_ms"][station] for r in results])
            for station in results[0]["cpu_ms"]
        },
        "peak_rss_mb": dict(peaks_mb),
    }


def compared(rows: Sequence[Row], rates: str) -> list[Row]:
    """With `to_first`: the rate over that of the first point in the same round."""
    base = next((row[rates] for row in rows if rates in row), [])

    def ratios(row: Row) -> Row:
        return (
            {
                "to_first": spread(
                    [mine / first for mine, first in zip(row[rates], base, strict=True)]
                )
            }
            if rates in row
            else {}
        )

    return [{**row, **ratios(row)} for row in rows]


def table(found: Mapping[str, Sequence[Row]]) -> str:
    header = (
        "",
        "",
        "rollouts/s",
        "tokens/s",
        "to the first",
        "min to max",
        "own CPU, ms",
        "broker's, ms",
        "buffer, MiB",
    )
    return markdown(
        header,
        [
            cells(CURVES[name].title if row is rows[0] else "", row)
            for name, rows in found.items()
            for row in rows
        ],
    )


def cells(title: str, row: Row) -> list[str]:
    if "failed" in row:
        return [title, f"{row['point']:,}", "failed", *[""] * 6]
    ratio = row["to_first"]
    cpu = row["cpu_ms_per_rollout"]
    own = sum(ms for station, ms in cpu.items() if station != "broker")
    rates = f"{row['rollouts_per_s']:,.0f}", f"{row['tokens_per_s'] / 1e6:.1f} M"
    ratios = f"{ratio['median']:.2f}", f"{ratio['min']:.2f} to {ratio['max']:.2f}"
    return [
        title,
        f"{row['point']:,}",
        *rates,
        *ratios,
        f"{own:.3f}",
        f"{cpu['broker']:.3f}",
        f"{row['peak_rss_mb']['buffer']:,.0f}",
    ]


def draw(found: Mapping[str, Sequence[Row]], path: Path) -> None:
    """A panel a curve: the rate over that of the first point, least to largest of the rounds
    shaded; for the window, the buffer's memory.
    """
    figure, panels = plt.subplots(2, 3, figsize=(12, 6.5), constrained_layout=True)
    for panel, (name, curve) in zip(panels.flat, CURVES.items(), strict=True):
        sound = [row for row in found.get(name, ()) if "to_first" in row]
        points = [row["point"] for row in sound]
        ratios = [row["to_first"] for row in sound]
        panel.fill_between(
            points,
            [r["min"] for r in ratios],
            [r["max"] for r in ratios],
            color="#1b6ca8",
            alpha=0.15,
            linewidth=0,
        )
        panel.plot(points, [r["median"] for r in ratios], "o-", color="#1b6ca8")
        panel.set_xscale("log")
        panel.set_xticks(curve.points, [f"{point:,}" for point in curve.points])
        panel.minorticks_off()
        panel.set_ylim(0, max([1.1, *(1.1 * r["max"] for r in ratios)]))
        panel.set_title(curve.title, fontsize=11)
        panel.set_ylabel(
            "tokens/s to the first" if curve.per_token else "rollouts/s to the first", fontsize=9
        )
        panel.grid(alpha=0.25)
        if name == "window":
            memory = panel.twinx()
            memory.plot(
                points, [row["peak_rss_mb"]["buffer"] for row in sound], "s--", color="#c8553d"
            )
            memory.set_ylabel("memory of the buffer, MiB (dashed)", fontsize=9, color="#c8553d")
            memory.set_ylim(bottom=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--curve", action="append", choices=CURVES, help="may be repeated; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of a round, after a second to get going"
    )
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    chosen = options.curve or list(CURVES)
    path = RESULTS / "scaling.json"
    started = time.monotonic()
    found: dict[str, list[Row]] = json.loads(path.read_text())["curves"] if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as room:
        for name in () if options.table else chosen:
            fill_page_cache(Path(room))
            with tempfile.TemporaryDirectory(dir=room) as directory:
                found[name] = measure(
                    name, CURVES[name], options.rounds, options.seconds, Path(directory)
                )
            found = {name: found[name] for name in CURVES if name in found}
            write(
                path,
                {
                    "curves": found,
                    "command": (
                        f"python -m bench.scaling --rounds {options.rounds} --seconds"
                        f" {options.seconds:g}"
                    ),
                },
            )
    draw(found, PICTURE)
    print(f"\n{table(found)}\n\n{(time.monotonic() - started) / 60:.1f} minutes; drawn: {PICTURE}")
    if failed := [
        f"{name} {row['point']}"
        for name in chosen
        for row in found.get(name, ())
        if "failed" in row
    ]:
        sys.exit(f"bench: failed: {', '.join(failed)}; why is in {path}")


if __name__ == "__main__":
    main()
