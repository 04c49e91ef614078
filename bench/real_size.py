"""A run of a model of a real size on this machine: memory by part, and the times of each step.

    python -m bench.real_size [--run deploy/runs/qwen3-0.6b.yaml] [--limit-gib 22]

The model is made first if it is not there (bench/random_model.py). Exit code 1 if a step is
missing, if the parts together held more memory than the limit, or if it took too long.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.measure import markdown
from bench.random_model import write
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.stream.local_kafka import broker, connect
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.records_of import records_of
from streamrl.stream.records import Metric

ROOT = Path(__file__).parents[1]
RUN = ROOT / "deploy" / "runs" / "qwen3-0.6b.yaml"
SHAPE = ROOT / "bench" / "shapes" / "qwen3-0.6b.json"
LIMIT_GIB = 22.0
LIMIT_S = 1200.0
LOOK_S = 3.0  # each look reads the pages of every process
GIB = 1 << 30
TIMES = (
    "learner/idle_s",
    "learner/step_s",
    "learner/publish_s",
    "learner/export_s",
    "learner/mismatch_kl",
)


class Memory(NamedTuple):
    """The most memory that was held, in bytes. What processes share is counted once."""

    parts: dict[str, int]
    together: int


class MemoryWatch:
    """Looks at the processes below one, until it ends."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._parts: dict[str, int] = defaultdict(int)
        self._together = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self) -> Memory:
        self._over.set()
        self._thread.join()
        return Memory(dict(self._parts), self._together)

    def _work(self) -> None:
        while not self._over.wait(LOOK_S):
            held: dict[str, int] = defaultdict(int)
            try:
                processes = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    held[part_of(process)] += process.memory_full_info().pss
                except psutil.Error:  # it has ended
                    continue
            for part, size in held.items():
                self._parts[part] = max(self._parts[part], size)
            self._together = max(self._together, sum(held.values()))


def part_of(process: psutil.Process) -> str:
    """What a process is, by its command line."""
    words = process.cmdline()
    if "streamrl.cli" in words:
        options = words[words.index("streamrl.cli") + 1 :]
        return next(word for word in options if not word.startswith("-"))
    if any("kafka" in word for word in words):
        return "broker"
    parent = process.parent()
    if parent is not None and "inference" in parent.cmdline():
        return "vLLM"
    return "vLLM" if any("vllm" in word.lower() for word in [*words, process.name()]) else "other"


def started(path: Path, directory: Path) -> RunFile:
    """The run, with what it makes below `directory`."""
    run = run_file.load(path)
    return RunFile.model_validate({**run.model_dump(), "runs_dir": str(directory)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=RUN)
    parser.add_argument("--shape", type=Path, default=SHAPE, help="config.json of its model")
    parser.add_argument("--limit-gib", type=float, default=LIMIT_GIB)
    options = parser.parse_args()
    began = time.monotonic()
    write(options.shape, ROOT / run_file.load(options.run).model.path)
    made = time.monotonic()
    print(f"the model: {made - began:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="streamrl-real-size-") as directory:
        run = started(options.run, Path(directory))
        path = Path(directory) / "run.json"
        path.write_text(run.to_json())
        command = [sys.executable, "-m", "streamrl.cli", "up", str(path)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        watch = MemoryWatch(process.pid)
        try:
            code = process.wait()
        finally:
            process.terminate()
            memory = watch.stop()
        took = time.monotonic() - made
        with broker.ensure_running(connect.broker_dir(run)) as address:
            log = KafkaLog({"bootstrap.servers": address}, run.run)
            metrics = [metric for metric, _ in records_of(log, topology.METRICS, Metric)]
    steps = [metric for metric in metrics if "learner/step_s" in metric.values]
    rows = [
        [str(metric.step), *(f"{metric.values.get(name, float('nan')):.4g}" for name in TIMES)]
        for metric in steps
    ]
    print(markdown(("step", *TIMES), rows))
    held = sorted(memory.parts.items(), key=lambda part: -part[1])
    sizes = [[part, f"{size / GIB:.1f}"] for part, size in held]
    sizes.append(["together", f"{memory.together / GIB:.1f}"])
    print(markdown(("part", "at most, GiB"), sizes))
    print(f"{len(steps)} steps, {took:.0f} s")
    wanted = run.orchestrator.max_steps
    is_good = len(steps) >= wanted and memory.together <= options.limit_gib * GIB
    sys.exit(code or not (is_good and took <= LIMIT_S))


if __name__ == "__main__":
    main()
