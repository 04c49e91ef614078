"""A run of many envs in one host, measured from outside: what `python -m tests.thousand_envs`
shows.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.measure import cpu_s
from streamrl.config import topology
from streamrl.extensions.recordings.audit import audit
from streamrl.stream.local_kafka import broker
from streamrl.stream.log.records_of import record_in
from streamrl.stream.records import PolicyVersion
from tests.loop.runs import ROOT, Live
from tests.support.brokers import CLASSES
from tests.thousand_envs.part import COUNTS, PARTS

DESCRIPTORS = 1_024  # that each process may have, but the broker
FILES_A_TOPIC = 2  # of the broker
GROUP_SIZE = 4
GROUP_TOKENS = 60  # about
ENVS_A_BATCH = 4  # each env has a group in every so many batches
BATCHES_AFTER_KILL = 4
# As in tests: a broker that starts quickly.
JAVA_OPTIONS = f"-XX:TieredStopAtLevel=1 -XX:SharedArchiveFile={CLASSES}"


@dataclass
class PartMeasured:
    """What a process takes."""

    name: str
    memory_mb: float
    threads: int
    descriptors: int
    cpu_frac: float  # of one core


@dataclass
class Measured:
    """What was found. Times are in seconds."""

    envs: int
    topics_s: float = 0.0
    first_batch_s: float = 0.0  # from `up`
    rollouts_per_s: float = 0.0
    requests_per_s: float = 0.0
    parts: list[PartMeasured] = field(default_factory=list[PartMeasured])
    status_s: float = 0.0  # of the live run
    batches_s: float = 0.0  # for BATCHES_AFTER_KILL batches before the kill
    restart_s: float = 0.0  # from kill -9 of the buffer to BATCHES_AFTER_KILL more batches
    batches: int = 0
    audit_s: float = 0.0
    is_balanced: bool = False
    share_min: float = 0.0  # of an env among all batched rollouts, times the number of envs
    share_max: float = 0.0
    expired_frac: float = 0.0
    replay_s: float = 0.0
    is_identical: bool = False


def settings(envs: int, families: int) -> dict[str, Any]:
    """A run file whose envs are alike and share a host. They are of so many families, which have
    topics; 0: each has its own.
    """
    return {
        "run": "thousand",
        "envs": {
            f"copy{number % families}--{number}" if families else f"copy-{number}": {
                "kind": "copy-digits",
                "host": "all",
                "fraction": 1 / envs,
                "max_tokens": 8,
            }
            for number in range(envs)
        },
        "buffer": {"group_size": GROUP_SIZE, "min_group_size": 2, "max_age": 3},
        "batcher": {
            "total_token_budget": max(envs // ENVS_A_BATCH, 1) * GROUP_TOKENS,
            "max_seq_len": 32,
            "lookahead": 1,
        },
        "model": {"max_seq_len": 32},
        "orchestrator": {"sinks": []},
    }


def measure(envs: int, families: int, directory: Path, seconds: float) -> Measured:
    """Run so many envs for so long, kill the buffer, stop the run, and account for it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with broker_without_limit(directory / "kafka", envs) as address:
        os.environ["STREAMRL_KAFKA"] = address
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        live = Live(directory, settings(envs, families))
        measured = Measured(envs)
        try:
            run_and_kill(live, measured, seconds)
        finally:
            live.close()
        account(live, measured)
    return measured


@contextmanager
def broker_without_limit(directory: Path, envs: int) -> Iterator[str]:
    """A broker, which has a file open for each segment of each topic."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_A_TOPIC * 5 * envs + DESCRIPTORS
    if 0 <= hard < needed:
        sys.exit(f"the broker needs {needed:,} descriptors: raise `ulimit -Hn`, which is {hard:,}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if CLASSES.exists():
        os.environ["JDK_JAVA_OPTIONS"] = JAVA_OPTIONS
    with broker.ensure_running(directory) as address:
        yield address


class Versions:
    """The newest policy version of a run. Version n exists once n batches were trained on."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.newest = -1
        self._reader = live.log().reader({topology.POLICY_VERSIONS_PARTITION: 0})

    def wait_for(self, version: int) -> None:
        def is_there() -> bool:
            for message in self._reader.poll(100, 0.1):
                record = record_in(message, PolicyVersion)
                self.newest = max(self.newest, record.version if record else -1)
            return self.newest >= version

        self.live.until(is_there, f"version {version}")


def run_and_kill(live: Live, measured: Measured, seconds: float) -> None:
    measured.topics_s = timed(lambda: check(live, "topics", "apply", str(live.file)))
    began = time.monotonic()
    live.up("--except", "learner", "--except", "inference")
    live.until(live.run.directory.exists, "the directory of the run")
    for name in PARTS:
        start(live, name)
    versions = Versions(live)
    versions.wait_for(1)
    measured.first_batch_s = time.monotonic() - began
    versions.wait_for(3)

    watched = dict(parts_of(live))
    counts = counted(live)
    before = {name: cpu_s(process.pid) for name, process in watched.items()}
    began = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - began
    measured.requests_per_s = (counted(live)["requests"] - counts["requests"]) / elapsed_s
    measured.rollouts_per_s = (counted(live)["answers"] - counts["answers"]) / elapsed_s
    for name, process in watched.items():
        measured.parts.append(
            PartMeasured(
                name,
                process.memory_info().rss / 1e6,
                process.num_threads(),
                process.num_fds(),
                (cpu_s(process.pid) - before[name]) / elapsed_s,
            )
        )
    measured.status_s = timed(lambda: check(live, "status", str(live.file)))

    versions.wait_for(0)
    began = time.monotonic()
    versions.wait_for(versions.newest + BATCHES_AFTER_KILL)
    measured.batches_s = time.monotonic() - began
    live.part("buffer").kill()
    began = time.monotonic()
    versions.wait_for(versions.newest + BATCHES_AFTER_KILL)
    measured.restart_s = time.monotonic() - began
    measured.batches = versions.newest
    assert live.process is not None
    live.process.terminate()
    live.wait(60)


def account(live: Live, measured: Measured) -> None:
    """What the log has of the run."""
    measured.audit_s = timed(lambda: check(live, "audit", str(live.file)))
    found = audit(live.log(), live.run)
    measured.is_balanced = found.balanced
    batched = dict.fromkeys(live.run.envs, 0)
    for (env, _), fates in found.counts.items():
        batched[env] += fates["batched"]
    total = sum(batched.values())
    measured.share_min = min(batched.values()) * len(batched) / total
    measured.share_max = max(batched.values()) * len(batched) / total
    measured.expired_frac = found.total("expired") / found.published
    began = time.monotonic()
    said = check(live, "replay", str(live.file))
    measured.replay_s = time.monotonic() - began
    measured.is_identical = f"{found_batches(said)} batches identical" in said


def found_batches(said: str) -> str:
    return said.split(" batches identical")[0].split()[-1]


def start(live: Live, name: str) -> None:
    log = (live.file.parent / f"{name}.log").open("ab")
    command = [sys.executable, "-m", "tests.thousand_envs.part", str(live.file), name]
    subprocess.Popen(
        command, cwd=ROOT, env=live.environment, stdout=log, stderr=log, start_new_session=True
    )


def parts_of(live: Live) -> Iterator[tuple[str, psutil.Process]]:
    for part in ("buffer", "batcher", "host"):
        yield part, live.part(part)
    for process in live.processes():
        line = process.cmdline()
        if "up" in line and "--except" in line:
            yield "orchestrator", process
        elif "tests.thousand_envs.part" in line:
            yield f"{line[-1]} (stand-in)", process
    found = broker.find(live.file.parent / "kafka")
    assert found is not None
    yield "broker", found.process


def counted(live: Live) -> dict[str, int]:
    return json.loads((live.run.directory / COUNTS).read_text())


def check(live: Live, *arguments: str) -> str:
    """The output of a command that must succeed."""
    done = live.command(*arguments, timeout_s=300)
    assert done.returncode == 0, f"streamrl {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
