"""Whole runs as a user starts them: `streamrl up` in a process of its own, watched from outside,
and nothing left when it is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.stream.local_kafka import broker, connect
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric, PolicyVersion, Record
from tests.support.processes import MARK, is_marked
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
STREAMRL = (sys.executable, "-m", "streamrl.cli")


class Live:
    """A run file in a directory of its own, and the processes that `streamrl up` makes of it."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.file = directory / "run.yaml"
        self.file.write_text(yaml.safe_dump({**settings, "runs_dir": str(directory / "runs")}))
        self.run: RunFile = run_file.load(self.file)
        self.mark = uuid.uuid4().hex
        self.output = directory / "output.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.sessions: set[int] = set()

    def up(self, *options: str) -> None:
        with self.output.open("ab") as output:
            command = [*STREAMRL, "up", str(self.file), *options]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
            )

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark, "XLA_FLAGS": ""}

    def command(
        self, *arguments: str, timeout_s: float = 60.0, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*STREAMRL, *arguments],
            capture_output=True,
            text=True,
            cwd=cwd,
            env=self.environment,
            timeout=patience(timeout_s),
        )

    def wait(self, timeout_s: float) -> int:
        assert self.process is not None
        return self.process.wait(patience(timeout_s))

    def until(self, true: Callable[[], bool], what: str, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + patience(timeout_s)
        while not true():
            assert self.process is None or self.process.poll() is None, (
                f"the run ended while waiting for {what}:\n{self.said()}"
            )
            assert time.monotonic() < deadline, (
                f"{what} did not come within {timeout_s:.0f} s:\n{self.said()}"
            )
            time.sleep(0.5)

    def said(self) -> str:
        logs = [
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-5:])
            for path in sorted(self.run.directory.glob("logs/*.log"))
        ]
        return "\n".join([*self.output.read_text(errors="replace").splitlines()[-15:], *logs])

    def log(self) -> KafkaLog:
        return KafkaLog(connect.client_settings(self.run), self.run.run)

    def records(self, topic: str, schema: str) -> Iterator[Record]:
        log = self.log()
        for partition in range(log.topics().get(topic, 0)):  # none yet while the run is starting
            for message in read(log, topic, partition):
                record = to_event(message, (schema,)).record
                if isinstance(record, Record):
                    yield record

    def version(self) -> int:
        """The newest announced; -1 before there is a broker."""
        is_local = "bootstrap.servers" not in connect.cluster_settings(self.run)
        if is_local and broker.running_address(connect.broker_dir(self.run)) is None:
            return -1
        return max(
            (
                r.version
                for r in self.records("policy-versions", "policy-version")
                if isinstance(r, PolicyVersion)
            ),
            default=-1,
        )

    def advances(self, by: int, what: str, timeout_s: float = 240.0) -> None:
        """Wait until `by` more versions are announced."""
        wanted = self.version() + by
        self.until(lambda: self.version() >= wanted, f"version {wanted} ({what})", timeout_s)

    def part(self, name: str) -> psutil.Process:
        """The process of a part, by its command line."""
        role = name.split()[0]
        options = name.split()[1:]
        for process in self.processes():
            line = command_line(process)
            if (
                "streamrl.cli" in line
                and role in line
                and all(option in line for option in options)
                and "up" not in line
                and "process_group.py" not in " ".join(line[:5])
            ):
                return process
        raise AssertionError(
            f"no process of {name} among {[command_line(p)[:8] for p in self.processes()]}"
        )

    def processes(self) -> list[psutil.Process]:
        """Everything that bears this run's mark, and whoever shares a session with one that does:
        vLLM's engine overwrites its environment.
        """
        alive = [process for process in psutil.process_iter() if process.is_running()]
        self.sessions |= {
            session
            for process in alive
            if is_marked(process, self.mark) and (session := session_of(process)) != os.getsid(0)
        }
        return [
            process
            for process in alive
            if is_marked(process, self.mark) or session_of(process) in self.sessions
        ]

    def report(self) -> dict[str, Any]:
        return json.loads((self.run.directory / "report.json").read_text())

    def nothing_left(self, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + patience(timeout_s)
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert [command_line(p)[:8] for p in self.processes()] == []

    def close(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process is not None:
            self.process.wait(patience(20))


def any_part(run: Live, part: str, old: int) -> bool:
    """Is there a process of that part other than the old one?"""
    try:
        return run.part(part).pid != old
    except AssertionError:
        return False


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def session_of(process: psutil.Process) -> int:
    """0 for one that has ended."""
    try:
        return 0 if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return 0


@contextmanager
def live(directory: Path, settings: dict[str, Any]) -> Iterator[Live]:
    made = Live(directory, settings)
    try:
        yield made
    finally:
        made.close()


def quickstart() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy" / "runs" / "quickstart.yaml").read_text())


def metric_values(run: Live, name: str) -> list[float]:
    return [
        record.values[name]
        for record in run.records("metrics", "metric")
        if isinstance(record, Metric) and name in record.values
    ]
