"""The data path, end to end: generator -> buffer -> batcher -> trainer, every station its own
process, on a real broker; and its limits.

    python -m bench.data_path [--rounds 5] [--seconds 5] [--vocab-size 50000] ...

bench/README.md says how and why; the figures go to bench/results/latest.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import floor
from bench.lines import Line, Place
from bench.measure import RESULTS, quantile, spread, write
from bench.memory import fill_page_cache
from bench.raw import TOPICS
from bench.work import LOOKAHEAD, Shape, run_file

HALF_LOAD_S = 8.0


def measure(
    shape: Shape, rounds: int, seconds: float, warm_s: float, directory: Path, lookahead: int
) -> dict[str, Any]:
    """One configuration: ours, the ceiling and the ceiling with transactions in turns, then ours at
    half load, then the floor.
    """
    fill_page_cache(directory)
    with ExitStack() as stack:
        place = Place(directory, stack)
        ours = place.ours("bench", shape, lookahead=lookahead)
        ours.turn(warm_s)  # empty before and after: what is in the files has come through
        before = place.topic_bytes("bench")
        done = ours.count.get()
        ours.turn(seconds)
        after = place.topic_bytes("bench")
        done = ours.count.get() - done
        bytes_per_rollout = {
            topic: (size - before.get(topic, 0)) / done for topic, size in after.items()
        }
        hops = {
            kind: sum(
                size for topic, size in bytes_per_rollout.items() if topic.partition(".")[0] == kind
            )
            for kind in TOPICS
        }
        raw = place.raw("raw", shape, hops, lookahead)
        exact = place.raw("exact", shape, hops, lookahead, transactions=True)
        for line in (raw, exact):
            line.turn(max(warm_s / 8, 2))

        own, ceiling, exact_ceiling = in_turns((ours, raw, exact), rounds, seconds)
        rates = [result["rollouts_per_s"] for result in own]
        ours.go(quantile(rates, 0.5) / 2)
        time.sleep(2)
        ours.stations["trainer"].order(report=True)
        ours.stations["trainer"].answer()
        time.sleep(HALF_LOAD_S)
        ours.stations["trainer"].order(report=True)
        latencies = ours.stations["trainer"].answer()["latencies_s"]
        ours.halt()
        cpu = cpu_ms(own)
        peaks = ours.peaks_mb()
    return {
        "shape": {**shape._asdict(), "lookahead": lookahead},
        "rollouts_per_s": spread(rates),
        "raw_rollouts_per_s": spread([result["rollouts_per_s"] for result in ceiling]),
        "ratio_to_raw": ratio(own, ceiling),
        "transactions_to_raw": ratio(exact_ceiling, ceiling),
        "floor": floor.measure(
            run_file("floor", directory, shape, lookahead=lookahead), shape, seconds
        ),
        "cpu_ms_per_rollout": cpu,
        "own_cpu_ms_per_rollout": of_processes(cpu),
        "broker_cpu_ms_per_rollout": cpu["broker"],
        "raw_cpu_ms_per_rollout": cpu_ms(ceiling),
        "transactions_cpu_ms_per_rollout": cpu_ms(exact_ceiling),
        "bytes_per_rollout": {**bytes_per_rollout, "all": sum(bytes_per_rollout.values())},
        "latency_ms": {
            "p50": 1000 * quantile(latencies, 0.5),
            "p99": 1000 * quantile(latencies, 0.99),
            "at_rollouts_per_s": quantile(rates, 0.5) / 2,
        },
        "peak_rss_mb": peaks,
    }


def in_turns(lines: Sequence[Line], rounds: int, seconds: float) -> list[list[dict[str, Any]]]:
    """What each did in its rounds; neighbours in time are compared."""
    results: list[list[dict[str, Any]]] = [[] for _ in lines]
    for _ in range(rounds):
        for line, done in zip(lines, results, strict=True):
            done.append(line.turn(seconds))
    return results


def cpu_ms(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """CPU of each process, ms a rollout: the median over the rounds."""
    return {
        name: quantile([result["cpu_ms"][name] for result in results], 0.5)
        for name in results[0]["cpu_ms"]
    }


def ratio(own: Sequence[Mapping[str, Any]], ceiling: Sequence[Mapping[str, Any]]) -> float:
    """The median over the rounds."""
    return quantile(
        [
            mine["rollouts_per_s"] / theirs["rollouts_per_s"]
            for mine, theirs in zip(own, ceiling, strict=True)
        ],
        0.5,
    )


def of_processes(cpu: Mapping[str, float]) -> float:
    """All of a line but the broker."""
    return sum(ms for name, ms in cpu.items() if name != "broker")


def table(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table("", *results, box=None, header_style="bold", title="the data path, end to end")
    for column in shown.columns[1:]:
        column.justify = "right"

    def row(name: str, cell: Any) -> None:
        shown.add_row(name, *(cell(result) for result in results.values()))

    row("rollouts/s, median", lambda r: f"{r['rollouts_per_s']['median']:,.0f}")
    row(
        "  min to max",
        lambda r: f"{r['rollouts_per_s']['min']:,.0f} - {r['rollouts_per_s']['max']:,.0f}",
    )
    row("raw ceiling, median", lambda r: f"{r['raw_rollouts_per_s']['median']:,.0f}")
    row(
        "  min to max",
        lambda r: f"{r['raw_rollouts_per_s']['min']:,.0f} - {r['raw_rollouts_per_s']['max']:,.0f}",
    )
    row("ours / raw, median of rounds", lambda r: f"{r['ratio_to_raw']:.2f}")
    row("raw with transactions / raw", lambda r: f"{r['transactions_to_raw']:.2f}")
    row("floor: the stages alone", lambda r: f"{r['floor']['rollouts_per_s']:,.0f}")
    row("CPU of ours, ms a rollout", lambda r: f"{r['own_cpu_ms_per_rollout']:.3f}")
    first = next(iter(results.values()))
    for name in first["cpu_ms_per_rollout"]:
        row(
            f"  {name}",
            lambda r, n=name: (
                f"{r['cpu_ms_per_rollout'][n]:.3f}"
                + ("" if n != "broker" else "  (not in the sum)")
            ),
        )
    for name, key in (("raw", "raw"), ("raw with transactions", "transactions")):
        row(
            f"  of {name}: its processes, the broker",
            lambda r, k=f"{key}_cpu_ms_per_rollout": (
                f"{of_processes(r[k]):.3f}, {r[k]['broker']:.3f}"
            ),
        )
    row("bytes a rollout, all topics", lambda r: f"{r['bytes_per_rollout']['all']:,.0f}")
    for topic in sorted(first["bytes_per_rollout"], key=lambda t: -first["bytes_per_rollout"][t]):
        if topic != "all" and first["bytes_per_rollout"][topic] >= 1:
            row(f"  {topic}", lambda r, t=topic: f"{r['bytes_per_rollout'].get(t, 0):,.0f}")
    row("publish to trainer array, p50", lambda r: f"{r['latency_ms']['p50']:.0f} ms")
    row("  p99, at half load", lambda r: f"{r['latency_ms']['p99']:.0f} ms")
    for name in first["peak_rss_mb"]:
        row(f"peak memory, {name}", lambda r, n=name: f"{r['peak_rss_mb'][n]:,.0f} MiB")
    row(
        "floor, microseconds a rollout",
        lambda r: f"{sum(r['floor']['us_per_rollout'].values()):.1f}",
    )
    for name in first["floor"]["us_per_rollout"]:
        row(f"  {name}", lambda r, n=name: f"{r['floor']['us_per_rollout'][n]:.1f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of a round, after a second to get going"
    )
    parser.add_argument(
        "--warm",
        type=float,
        default=60.0,
        help="seconds before the first round: the JVM needs half a million records",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        action="append",
        help="may be repeated: a column each; default 50,000 and 150,000",
    )
    parser.add_argument("--batch", type=int, default=Shape().batch, help="rollouts")
    parser.add_argument(
        "--lookahead", type=int, default=LOOKAHEAD, help="batches: how deep the pipeline is"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "latest.json")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for vocab_size in options.vocab_size or [50_000, 150_000]:
        with tempfile.TemporaryDirectory() as directory:
            name = f"vocabulary {vocab_size:,}"
            shape = Shape(vocab_size=vocab_size, batch=options.batch)
            results[name] = measure(
                shape,
                options.rounds,
                options.seconds,
                options.warm,
                Path(directory),
                lookahead=options.lookahead,
            )
    Console().print(table(results))
    first, *others = results.values()
    command = (
        f"python -m bench.data_path --rounds {options.rounds} --seconds {options.seconds:g} --warm"
        f" {options.warm:g}"
    )
    write(options.out, {**first, "others": others, "command": command})


if __name__ == "__main__":
    main()
