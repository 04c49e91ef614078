"""A broker, and lines of stations on it: each station a process, a line started together and halted
while another one is measured.

A line may have a place to itself: its broker halts with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from bench.measure import cpu_s, peak_rss_mb
from bench.raw import JOURNAL, TOPICS
from bench.stations import Count
from bench.work import LOOKAHEAD, Shape, run_file
from streamrl.stream.local_kafka import broker
from streamrl.stream.local_kafka.broker import Setup
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import end_offset

HERE = [sys.executable, "-m"]
START_S = 60.0  # at most
LONG_MS = 3_600_000
# Of a broker that halts with its line: it is not thought dead when it goes on, and keeps a few
# seconds of what went through, not all of it.
HALTING = Setup(
    {
        "broker.session.timeout.ms": str(LONG_MS),
        "log.segment.bytes": str(128 << 20),
        "log.retention.bytes": str(512 << 20),  # of a partition, at least
        "log.retention.check.interval.ms": "2000",
        "log.segment.delete.delay.ms": "1000",
    }
)


class Station:
    """A process of the data path."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], logs: Path
    ) -> None:
        self.name = name
        self._log = (logs / f"{name}.log").open("wb")
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def order(self, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(values).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def check(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(
                f"bench: {self.name} ended with {self.process.returncode}: {self.tail(1000)}"
            )

    def tail(self, characters: int) -> str:
        """The end of its log."""
        return Path(self._log.name).read_text(errors="replace")[-characters:]

    def leave(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGCONT)
        if self.process.stdin:
            self.process.stdin.close()
        self.process.terminate()

    def wait(self) -> None:
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class Slowest:
    """What several processes have all done."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._counts = [Count(path) for path in paths]

    def get(self) -> int:
        return min(count.get() for count in self._counts)


class Line:
    """Stations one behind another: started together, halted while another line is measured. Those
    of `counted` are at its end.
    """

    def __init__(
        self,
        stations: dict[str, list[str]],
        first: str,
        counted: Sequence[str],
        environment: dict[str, str],
        directory: Path,
        kafka: psutil.Popen,
        alone: bool,
    ) -> None:
        self.stations = {
            name: Station(name, command, environment, directory)
            for name, command in stations.items()
        }
        self.first = first
        self._kafka = kafka
        self._alone = alone
        self._counted = [directory / name for name in counted]

    def wait(self) -> None:
        """Until all of it has started."""
        deadline = time.monotonic() + START_S
        while missing := [path.name for path in self._counted if not path.exists()]:
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"bench: {missing[0]} has not started within {START_S:.0f} s: {self.tails()}"
                )
            time.sleep(0.05)

    @cached_property
    def count(self) -> Slowest:
        """Rollouts that have come through."""
        return Slowest(self._counted)

    def check(self) -> None:
        for station in self.stations.values():
            station.check()

    def tails(self) -> str:
        """What each station has said last, on a line each."""
        return "\n".join(
            f"{name}: {station.tail(300).strip() or 'nothing'}"
            for name, station in self.stations.items()
        )

    def go(self, rate: float | None) -> None:
        if self._alone:
            self._kafka.send_signal(signal.SIGCONT)
        for station in self.stations.values():
            station.process.send_signal(signal.SIGCONT)
        self.stations[self.first].order(rate=rate)

    def halt(self) -> None:
        """Let it run empty, then freeze it: what stands still costs nothing. A station that is
        frozen within a transaction finds that its time is over.
        """
        self.stations[self.first].order(rate=0)
        before = -1
        while before != (before := self.count.get()):
            time.sleep(0.5)
        for station in self.stations.values():
            station.process.send_signal(signal.SIGSTOP)
        if self._alone:
            self._kafka.send_signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> dict[str, Any]:
        """`run`; afterwards it is empty, and stands still."""
        result = self.run(seconds)
        self.halt()
        return result

    def run(self, seconds: float) -> dict[str, Any]:
        """Rollouts/s over `seconds`, and the CPU of every station and of the broker, in ms a
        rollout.
        """
        self.go(None)
        time.sleep(1.0)
        pids = {name: station.process.pid for name, station in self.stations.items()} | {
            "broker": self._kafka.pid
        }
        started = time.monotonic()
        before = self.count.get()
        cpu = {name: cpu_s(pid) for name, pid in pids.items()}
        time.sleep(seconds)
        elapsed = time.monotonic() - started
        done = self.count.get() - before
        self.check()
        if not done:
            raise SystemExit(f"bench: nothing came out in {seconds:g} s: {self.tails()}")
        return {
            "rollouts_per_s": done / elapsed,
            "cpu_ms": {name: 1000 * (cpu_s(pid) - cpu[name]) / done for name, pid in pids.items()},
        }

    def peaks_mb(self) -> dict[str, float]:
        """The most memory that each station and the broker have held, in MiB."""
        pids = {name: station.process.pid for name, station in self.stations.items()} | {
            "broker": self._kafka.pid
        }
        return {name: peak_rss_mb(pid) for name, pid in pids.items()}

    def stop(self) -> None:
        if self._alone:
            self._kafka.send_signal(signal.SIGCONT)
        for station in self.stations.values():
            station.leave()
        for station in self.stations.values():
            station.wait()


class Place:
    """A directory with a broker of its own, and the lines that were built on it: or, with `alone`,
    the one line that it halts with.
    """

    def __init__(self, directory: Path, stack: ExitStack, alone: bool = False) -> None:
        self.directory = directory
        self._stack = stack
        self._alone = alone
        self.kafka = broker.start(directory / "kafka", setup=HALTING if alone else broker.PLAIN)
        stack.callback(self.kafka.stop)
        self.environment = {
            **os.environ,
            "STREAMRL_KAFKA": self.kafka.address,
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }

    @property
    def address(self) -> dict[str, str]:
        return {"bootstrap.servers": self.kafka.address}

    def ours(self, name: str, shape: Shape, followers: int = 0, **kinds: int) -> Line:
        """generator -> buffer -> batcher -> trainer, as run `name`; `followers` more trainers read
        the same batches. `kinds`: see `run_file`.
        """
        run = run_file(name, self.directory, shape, **kinds)
        directory = self._room(name)
        topic_changes.apply(run, self.address)
        log = KafkaLog(self.address, name)
        # a broker makes hundreds of logs one after another, and is slow to answer meanwhile
        for topic, partitions in log.topics().items():
            end_offset(log, topic, partitions - 1)
        path = directory / "run.json"
        settings = directory / "settings.json"
        path.write_text(run.to_json())
        settings.write_text(
            json.dumps(
                {
                    "run": run.model_dump(mode="json"),
                    "shape": shape._asdict(),
                    "kafka": self.address,
                    "counts": str(directory),
                }
            )
        )
        followers_named = [f"follower-{i}" for i in range(followers)]
        stations = {
            "generator": [*HERE, "bench.stations", "generator", str(settings)],
            "buffer": [*HERE, "streamrl.cli", "buffer", str(path)],
            "batcher": [*HERE, "streamrl.cli", "batcher", str(path)],
            "trainer": [*HERE, "bench.stations", "trainer", str(settings)],
            **{name: [*HERE, "bench.stations", name, str(settings)] for name in followers_named},
        }
        return self._line(stations, "generator", ["trainer", *followers_named], directory)

    def raw(
        self,
        name: str,
        shape: Shape,
        hops: dict[str, float],
        lookahead: int = LOOKAHEAD,
        transactions: bool = False,
    ) -> Line:
        """The ceiling with as many bytes on each hop as ours had: `hops`, a rollout; and twice as
        much in flight. `transactions`: see `raw.py`.
        """
        directory = self._room(name)
        config = {"max.message.bytes": "8388608", "retention.ms": "3600000"}
        admin = AdminClient(self.address)  # kept: its requests end with it
        for made in admin.create_topics(
            [NewTopic(f"{name}.{topic}", 1, 1, config=config) for topic in (*TOPICS, JOURNAL)]
        ).values():
            made.result()
        sizes = {
            "rollout_bytes": int(hops["rollouts"]),
            "group_bytes": int(hops["groups"] * shape.group),
            "batch_bytes": int(hops["batches"] * shape.batch),
            "batch": shape.batch,
            "group": shape.group,
            "at_once": shape.transaction_groups * shape.group,
            "in_flight": 2 * (lookahead + 1) * shape.batch,
        }
        path = directory / "raw.json"
        settings = {
            "kafka": self.address,
            "counts": str(directory),
            "raw": sizes,
            "raw_prefix": name,
            "raw_transactions": transactions,
        }
        path.write_text(json.dumps(settings))
        Count(directory / "sink", create=True)
        stations = {
            role: [*HERE, "bench.raw", role, str(path)]
            for role in ("sink", "relay", "gather", "source")
        }
        return self._line(stations, "source", ["source", "sink"], directory)

    def topic_bytes(self, name: str) -> dict[str, int]:
        """Bytes in the broker's files by topic of run `name`, partitions together: headers and
        batch overhead included.
        """
        sizes: dict[str, int] = {}
        for path in (self.directory / "kafka").glob(f"**/{name}.*/*.log"):
            topic = path.parent.name.rpartition("-")[0].removeprefix(f"{name}.")
            sizes[topic] = sizes.get(topic, 0) + path.stat().st_size
        return sizes

    def _room(self, name: str) -> Path:
        directory = self.directory / "lines" / name
        directory.mkdir(parents=True)
        return directory

    def _line(
        self, stations: dict[str, list[str]], first: str, counted: Sequence[str], directory: Path
    ) -> Line:
        line = Line(
            stations=stations,
            first=first,
            counted=counted,
            environment=self.environment,
            directory=directory,
            kafka=self.kafka.process,
            alone=self._alone,
        )
        self._stack.callback(line.stop)
        line.wait()
        return line
