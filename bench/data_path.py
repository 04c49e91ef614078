"""The data path, end to end: generator -> buffer -> batcher -> trainer, every station its own process, on a real broker; and its limits.

    python -m bench.data_path [--rounds 5] [--seconds 5] [--vocab-size 50000] ...

bench/README.md says how and why; the figures go to bench/results/latest.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

from bench import floor
from bench.measure import cpu_s, peak_rss_mb, quantile, spread
from bench.raw import TOPICS
from bench.stations import Count
from bench.work import Shape, run_file
from streamrl import topics
from streamrl.config import RunFile
from streamrl.stream import broker

RESULTS = Path(__file__).parent / "results"
HALF_LOAD_S = 8.0


class Station:
    """A process of the data path."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], logs: Path) -> None:
        self.name = name
        self._log = (logs / f"{name}.log").open("wb")
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)

    def order(self, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(values).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def check(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"bench: {self.name} ended with {self.process.returncode}: {Path(self._log.name).read_text()[-1000:]}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        if self.process.stdin:
            self.process.stdin.close()
        self.process.terminate()
        self.process.wait(20)
        self._log.close()


class Line:
    """Stations one behind another: started together, halted while another line is measured."""

    def __init__(self, stations: dict[str, list[str]], first: str, counted: Path, environment: dict[str, str], logs: Path) -> None:
        self.stations = {name: Station(name, command, environment, logs) for name, command in stations.items()}
        self.first, self._counted = first, counted
        deadline = time.monotonic() + 60
        while not counted.exists():
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"bench: {counted.name} has not started within 60 s; see {logs}")
            time.sleep(0.05)
        self.count = Count(counted)

    def check(self) -> None:
        for station in self.stations.values():
            station.check()

    def go(self, rate: float | None) -> None:
        for station in self.stations.values():
            station.process.send_signal(signal.SIGCONT)
        self.stations[self.first].order(rate=rate)

    def halt(self) -> None:
        """Let it run empty, then freeze it: what stands still costs nothing."""
        self.stations[self.first].order(rate=0)
        before = -1
        while before != (before := self.count.get()):
            time.sleep(0.5)
        for station in self.stations.values():
            station.process.send_signal(signal.SIGSTOP)

    def run(self, seconds: float, kafka: int, rate: float | None = None) -> dict[str, Any]:
        """Rollouts/s over `seconds`, and the CPU of every station and of the broker, in ms a rollout."""
        self.go(rate)
        time.sleep(1.0)
        pids = {name: station.process.pid for name, station in self.stations.items()} | {"broker": kafka}
        started, before, cpu = time.monotonic(), self.count.get(), {name: cpu_s(pid) for name, pid in pids.items()}
        time.sleep(seconds)
        elapsed, done = time.monotonic() - started, self.count.get() - before
        self.check()
        if not done:
            raise SystemExit(f"bench: nothing came out of {', '.join(self.stations)} in {seconds} s; see their logs")
        return {"rollouts_per_s": done / elapsed, "cpu_ms": {name: 1000 * (cpu_s(pid) - cpu[name]) / done for name, pid in pids.items()}}

    def stop(self) -> None:
        for station in self.stations.values():
            station.stop()


def topic_bytes(data: Path) -> dict[str, int]:
    """Bytes in the broker's log by topic, partitions together."""
    sizes: dict[str, int] = {}
    for path in data.glob("**/*.log"):
        if "-" in path.parent.name:
            topic = path.parent.name.rpartition("-")[0]
            sizes[topic] = sizes.get(topic, 0) + path.stat().st_size
    return sizes


def measure(shape: Shape, rounds: int, seconds: float, warm_s: float, directory: Path, **kinds: int) -> dict[str, Any]:
    """One configuration: ours and the ceiling in turns, then ours at half load, then the floor."""
    run = run_file("bench", directory, shape, **kinds)
    counts = directory / "counts"
    counts.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        kafka = broker.start(directory / "kafka")
        stack.callback(kafka.stop)
        address = {"bootstrap.servers": kafka.address}
        topics.apply(run, address)
        settings, path = (
            {"run": run.model_dump(mode="json"), "shape": shape._asdict(), "kafka": address, "counts": str(counts)},
            directory / "run.json",
        )
        path.write_text(run.to_json())
        (directory / "settings.json").write_text(json.dumps(settings))
        environment = {**os.environ, "STREAMRL_KAFKA": kafka.address, "PYTHONPATH": str(Path(__file__).parents[1])}
        here = [sys.executable, "-m"]
        ours = Line(
            {
                "generator": [*here, "bench.stations", "generator", str(directory / "settings.json")],
                "buffer": [*here, "streamrl.cli", "buffer", str(path)],
                "batcher": [*here, "streamrl.cli", "batcher", str(path)],
                "trainer": [*here, "bench.stations", "trainer", str(directory / "settings.json")],
            },
            "generator",
            counts / "trainer",
            environment,
            directory,
        )
        stack.callback(ours.stop)
        ours.run(warm_s, kafka.process.pid)
        before, done = topic_bytes(directory / "kafka"), ours.count.get()
        time.sleep(1)
        ours.halt()
        after, done = topic_bytes(directory / "kafka"), ours.count.get() - done
        bytes_per_rollout = {
            topic.partition(".")[2]: (size - before.get(topic, 0)) / done for topic, size in after.items() if topic.startswith("bench.")
        }
        hops = {kind: sum(size for topic, size in bytes_per_rollout.items() if topic.partition(".")[0] == kind) for kind in TOPICS}

        raw = start_raw(shape, run, settings, hops, directory, environment)
        stack.callback(raw.stop)
        raw.run(max(warm_s / 4, 2), kafka.process.pid)
        raw.halt()

        own, ceiling = list[dict[str, Any]](), list[dict[str, Any]]()
        for _ in range(rounds):
            for line, results in ((raw, ceiling), (ours, own)):
                results.append(line.run(seconds, kafka.process.pid))
                line.halt()
        rates = [result["rollouts_per_s"] for result in own]
        ours.go(quantile(rates, 0.5) / 2)
        time.sleep(2)
        ours.stations["trainer"].order(report=True)
        ours.stations["trainer"].answer()
        time.sleep(HALF_LOAD_S)
        ours.stations["trainer"].order(report=True)
        latencies = ours.stations["trainer"].answer()["latencies_s"]
        ours.halt()
        cpu = {name: quantile([result["cpu_ms"][name] for result in own], 0.5) for name in own[0]["cpu_ms"]}
        peaks = {name: peak_rss_mb(station.process.pid) for name, station in ours.stations.items()} | {"broker": peak_rss_mb(kafka.process.pid)}
    return {
        "shape": shape._asdict(),
        "rollouts_per_s": spread(rates),
        "raw_rollouts_per_s": spread([result["rollouts_per_s"] for result in ceiling]),
        "ratio_to_raw": quantile([ours / theirs for ours, theirs in zip(rates, (r["rollouts_per_s"] for r in ceiling), strict=True)], 0.5),
        "floor": floor.measure(run, shape, seconds) if len(run.envs) == 1 else {},
        "cpu_ms_per_rollout": cpu,
        "own_cpu_ms_per_rollout": sum(ms for name, ms in cpu.items() if name != "broker"),
        "broker_cpu_ms_per_rollout": cpu["broker"],
        "raw_cpu_ms_per_rollout": {name: quantile([result["cpu_ms"][name] for result in ceiling], 0.5) for name in ceiling[0]["cpu_ms"]},
        "bytes_per_rollout": {**bytes_per_rollout, "all": sum(bytes_per_rollout.values())},
        "latency_ms": {
            "p50": 1000 * quantile(latencies, 0.5),
            "p99": 1000 * quantile(latencies, 0.99),
            "at_rollouts_per_s": quantile(rates, 0.5) / 2,
        },
        "peak_rss_mb": peaks,
    }


def start_raw(shape: Shape, run: RunFile, settings: dict[str, Any], hops: dict[str, float], directory: Path, environment: dict[str, str]) -> Line:
    """The ceiling with as many bytes on each hop as ours had."""
    admin = AdminClient(settings["kafka"])
    made = admin.create_topics(
        [NewTopic(f"raw.{topic}", 1, 1, config={"max.message.bytes": "8388608", "retention.ms": "3600000"}) for topic in TOPICS]
    )
    for future in made.values():
        future.result()
    sizes = {
        "rollout_bytes": int(hops["rollouts"]),
        "group_bytes": int(hops["groups"] * shape.group),
        "batch_bytes": int(hops["batches"] * shape.batch),
        "batch": shape.batch,
        "group": shape.group,
        "in_flight": 2 * (run.batcher.lookahead + 1) * shape.batch,
    }
    path = directory / "raw.json"
    path.write_text(json.dumps({**settings, "raw": sizes, "raw_prefix": "raw"}))
    Count(Path(settings["counts"]) / "sink", create=True)
    stations = {role: [sys.executable, "-m", "bench.raw", role, str(path)] for role in ("sink", "relay", "gather", "source")}
    return Line(stations, "source", Path(settings["counts"]) / "source", environment, directory)


def table(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table("", *results, box=None, header_style="bold", title="the data path, end to end")
    for column in shown.columns[1:]:
        column.justify = "right"

    def row(name: str, cell: Any) -> None:
        shown.add_row(name, *(cell(result) for result in results.values()))

    row("rollouts/s, median", lambda r: f"{r['rollouts_per_s']['median']:,.0f}")
    row("  min to max", lambda r: f"{r['rollouts_per_s']['min']:,.0f} - {r['rollouts_per_s']['max']:,.0f}")
    row("raw ceiling, median", lambda r: f"{r['raw_rollouts_per_s']['median']:,.0f}")
    row("  min to max", lambda r: f"{r['raw_rollouts_per_s']['min']:,.0f} - {r['raw_rollouts_per_s']['max']:,.0f}")
    row("ours / raw, median of rounds", lambda r: f"{r['ratio_to_raw']:.2f}")
    row("floor: the stages alone", lambda r: f"{r['floor']['rollouts_per_s']:,.0f}")
    row("CPU of ours, ms a rollout", lambda r: f"{r['own_cpu_ms_per_rollout']:.3f}")
    first = next(iter(results.values()))
    for name in first["cpu_ms_per_rollout"]:
        row(f"  {name}", lambda r, n=name: f"{r['cpu_ms_per_rollout'][n]:.3f}" + ("" if n != "broker" else "  (not in the sum)"))
    row(
        "  of raw: its processes, the broker",
        lambda r: f"{sum(v for k, v in r['raw_cpu_ms_per_rollout'].items() if k != 'broker'):.3f}, {r['raw_cpu_ms_per_rollout']['broker']:.3f}",
    )
    row("bytes a rollout, all topics", lambda r: f"{r['bytes_per_rollout']['all']:,.0f}")
    for topic in sorted(first["bytes_per_rollout"], key=lambda t: -first["bytes_per_rollout"][t]):
        if topic != "all" and first["bytes_per_rollout"][topic] >= 1:
            row(f"  {topic}", lambda r, t=topic: f"{r['bytes_per_rollout'].get(t, 0):,.0f}")
    row("publish to trainer array, p50", lambda r: f"{r['latency_ms']['p50']:.0f} ms")
    row("  p99, at half load", lambda r: f"{r['latency_ms']['p99']:.0f} ms")
    for name in first["peak_rss_mb"]:
        row(f"peak memory, {name}", lambda r, n=name: f"{r['peak_rss_mb'][n]:,.0f} MiB")
    row("floor, microseconds a rollout", lambda r: f"{sum(r['floor']['us_per_rollout'].values()):.1f}")
    for name in first["floor"]["us_per_rollout"]:
        row(f"  {name}", lambda r, n=name: f"{r['floor']['us_per_rollout'][n]:.1f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round, after a second to get going")
    parser.add_argument("--warm", type=float, default=30.0, help="seconds before the first round: the JVM needs some hundred thousand records")
    parser.add_argument("--vocab-size", type=int, action="append", help="may be repeated: a column each; default 50,000 and 150,000")
    parser.add_argument("--batch", type=int, default=Shape().batch, help="rollouts")
    parser.add_argument("--lookahead", type=int, default=8, help="batches: how deep the pipeline is")
    parser.add_argument("--out", type=Path, default=RESULTS / "latest.json")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for vocab_size in options.vocab_size or [50_000, 150_000]:
        with tempfile.TemporaryDirectory() as directory:
            name = f"vocabulary {vocab_size:,}"
            shape = Shape(vocab_size=vocab_size, batch=options.batch)
            results[name] = measure(shape, options.rounds, options.seconds, options.warm, Path(directory), lookahead=options.lookahead)
    Console().print(table(results))
    machine = {"cores": psutil.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30), "python": platform.python_version()}
    first, *others = results.values()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**first, "others": others, "machine": machine, "command": " ".join(sys.argv)}, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
