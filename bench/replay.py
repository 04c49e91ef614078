"""Replay, audit, export and import of a long run: how long each takes, and the most memory it
holds.

    python -m bench.replay [--rollouts 100000] [--prompt 16] [--response 32] ...

Makes the run with the real buffer and batcher on a real broker, then runs every command as a
process of its own, as a user does. The exit code is 1 when one fails or holds more than `LIMIT_MB`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import RESULTS, write
from bench.work import Shape, Source, run_file
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.orchestrator.run_directory import write_run_file
from streamrl.stream.local_kafka import broker, connect
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion

ROOT = Path(__file__).parents[1]
STREAMRL = (sys.executable, "-m", "streamrl.cli")
LIMIT_MB = 1024
COMMANDS = (
    "replay long",
    "audit long",
    "export long x",
    "replay x",
    "audit x",
    "import x --as again",
    "replay again",
)
AHEAD = 4  # batches that may be on their way
GROUPS_AT_ONCE = 16  # of a transaction, as an env that finishes some in a tick


def main() -> None:
    with long_run(__doc__) as (run, address, work):
        measured = [
            measure(run.directory.parents[1], address, *command.split()) for command in COMMANDS
        ]
    show(measured, work)
    if any(m["exit_code"] or m["peak_mb"] > LIMIT_MB for m in measured):
        sys.exit(1)


@contextmanager
def long_run(about: str | None) -> Iterator[tuple[RunFile, str, dict[str, Any]]]:
    """A run as the command line wants it, in a directory and on a broker of its own: (run, address,
    what it is made of). `about`: for --help.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--response", type=int, default=32, help="tokens")
    parser.add_argument("--batch", type=int, default=1024, help="rollouts")
    parser.add_argument("--envs", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory:
        shape = Shape(
            prompt=given.prompt, response=given.response, vocab_size=1000, batch=given.batch
        )
        run = run_file("long", Path(directory) / "runs", shape, given.envs)
        run.directory.mkdir(parents=True)
        write_run_file(run)
        with broker.ensure_running(connect.broker_dir(run)) as address:
            started = time.monotonic()
            made = make(run, address, shape, given.rollouts)
            print(f"{made:,} rollouts in {time.monotonic() - started:.0f} s", flush=True)
            yield run, address, {"rollouts": made, **shape._asdict(), "envs": given.envs}


def make(run: RunFile, address: str, shape: Shape, rollouts: int) -> int:
    """A run of so many rollouts, rounded up to whole groups. The feeder is env and learner in one:
    it announces a version for each batch.
    """
    log = KafkaLog({"bootstrap.servers": address}, run.run)
    topic_changes.apply(run, {"bootstrap.servers": address})
    source = Source(shape)
    batches = log.reader({("batches", 0): 0})
    env = log.writer("feeder-env")
    learner = log.writer("feeder-learner")
    sent = trained = number = 0
    with working("buffer", run), working("batcher", run):
        announce(learner, 0)
        while sent < rollouts:
            if sent < (trained + AHEAD) * shape.batch:
                groups = [
                    source.group(name, number + i, trained)
                    for i in range(GROUPS_AT_ONCE // len(run.envs))
                    for name in run.envs
                ]
                env.commit(
                    [
                        to_message(Output(topology.rollouts(r.environment), r.group_id, r))
                        for group in groups
                        for r in group
                    ]
                )
                sent = sent + sum(map(len, groups))
                number = number + GROUPS_AT_ONCE // len(run.envs)
            for _ in batches.poll(100, 0.0 if sent < (trained + AHEAD) * shape.batch else 0.02):
                trained += 1
                announce(learner, trained)
        time.sleep(3)  # the last batches: what is left over is in flight
    return sent


def announce(learner: Any, version: int) -> None:
    record = PolicyVersion(
        learner="lead",
        version=version,
        uri="",
        size_bytes=0,
        sha256="",
        batch=version - 1 if version else None,
    )
    learner.commit([to_message(Output("policy-versions", "lead", record))])


@contextmanager
def working(role: str, run: RunFile) -> Iterator[None]:
    process = subprocess.Popen(
        [*STREAMRL, role, str(run.directory / "run.yaml")], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def measure(directory: Path, address: str, *command: str) -> dict[str, Any]:
    """Run a command to its end: seconds, and the peak of its resident memory in MiB as the kernel
    counts it.
    """
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STREAMRL_KAFKA": address}
    process = subprocess.Popen(
        [*STREAMRL, *command], cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.read().strip().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "command": " ".join(command),
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "peak_mb": round(usage.ru_maxrss / 1024),
        "said": said[-1] if said else "",
    }


def show(measured: list[dict[str, Any]], work: dict[str, Any]) -> None:
    table = Table("command", "s", "peak MiB", "said", box=None, header_style="bold")
    for m in measured:
        table.add_row(
            m["command"],
            f"{m['seconds']:.1f}",
            str(m["peak_mb"]),
            m["said"] if m["exit_code"] == 0 else f"exit code {m['exit_code']}",
        )
    Console(width=150).print(table)
    write(RESULTS / "replay.json", {"work": work, "limit_mb": LIMIT_MB, "commands": measured})


if __name__ == "__main__":
    main()
