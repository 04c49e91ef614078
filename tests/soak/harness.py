"""Runs a soak: starts everybody, does to them what is planned, notes what it sees, lets the run
come to rest.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from streamrl.config import topology
from streamrl.config.run_file import RUN_FILE, RunFile
from streamrl.extensions.recordings.progress import OnProgress, no_progress
from streamrl.run.orchestrator import run_directory
from streamrl.run.orchestrator.plan import BROKER, Abort, decide
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.stream.local_kafka import broker, connect
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import end_offset
from tests.chaos.harness import ROOT, TICK_S, Stuck
from tests.soak import known
from tests.soak.clock import STEP_S, Clock
from tests.soak.disk import Disk
from tests.soak.learner import noted
from tests.soak.memory import Sample
from tests.soak.part import CLOCK
from tests.soak.pauses import Incident
from tests.support.waiting import patience

PATIENCE_S = 120.0  # for whatever must come
SAMPLES = 400  # of each process, over the whole time, at least 0.5 s and at most 5 s apart
# parts of the time; what ends processes comes in its first third, the memory is looked at after
# that
BROKER_AT = (0.08, 0.16)
DISK_AT = 0.24
# how long the disk is full: the smaller of the two
DISK_FRAC = 0.08
DISK_S = 20.0
CLOCK_AT = (0.5, 0.75)  # an hour forward, and back
MEMORY_SINCE = 1 / 3
QUIET_S = 5.0  # without a batch: the run has come to rest


@dataclass
class Seen:
    """What was done to a run, and what was seen of it."""

    started_s: float = 0.0  # monotonic
    seconds: float = 0.0  # of production
    incidents: list[Incident] = field(default_factory=list[Incident])
    samples: list[Sample] = field(default_factory=list[Sample])
    said: str = ""  # by the learner, of the full disk
    own_disk: bool = False
    # exit codes of every end that nobody asked for, by process
    ends: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class Soak:
    """A run and whoever works on it. From the main thread only: nothing outlives it."""

    def __init__(self, run: RunFile) -> None:
        self.run, self.clock, self.disk = (
            run,
            Clock(run.directory / CLOCK),
            Disk(run.directory / "weights"),
        )
        environment = {
            name: value for name, value in os.environ.items() if name != "STREAMRL_KAFKA"
        }
        self.supervisor = Supervisor(
            run.directory / "logs", {**environment, "PYTHONPATH": str(ROOT)}
        )
        self.seen = Seen(own_disk=self.disk.own)
        self._wanted = [BROKER]
        self._next_sample_s = 0.0
        self._sample_s = 5.0
        self._watched: dict[int, psutil.Process] = {}

    def close(self) -> None:
        try:
            self.supervisor.close(limit_s=5.0)
        finally:
            self.disk.close()

    # ---- supervision, as `streamrl up` does it ---------------------------------------------------

    def tick(self) -> None:
        """Start what is not running, and look at what is."""
        self.supervisor.notice_exits()
        observed = self.supervisor.observe()
        for action in decide(self._wanted, observed, time.monotonic()):
            if isinstance(action, Abort):
                raise Stuck(
                    f"{action.name} is not started again: {action.reason}; it said:"
                    f" {self.supervisor.last_line(action.name)}"
                )
            self.supervisor.start(action.name, self._command(action.name))
        self.seen.ends.update(
            {
                name: [end.exit_code for end in part.ends]
                for name, part in observed.items()
                if part.ends
            }
        )
        if self.seen.started_s and time.monotonic() >= self._next_sample_s:
            self._next_sample_s = time.monotonic() + self._sample_s
            self.sample()

    def _command(self, name: str) -> list[str]:
        file = str(self.run.directory / RUN_FILE)
        return [
            sys.executable,
            "-m",
            *(
                ("streamrl.cli", BROKER, file)
                if name == BROKER
                else ("tests.soak.part", file, name)
            ),
        ]

    def rest_until(self, moment_s: float) -> None:
        """Until so long after the beginning."""
        while time.monotonic() < self.seen.started_s + moment_s:
            self.tick()
            time.sleep(TICK_S * 5)

    def until(self, true: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience(limit_s)
        while not true():
            self.tick()
            if time.monotonic() > deadline:
                lines = "; ".join(
                    f"{name}: {self.supervisor.last_line(name)}"
                    for name in self._wanted
                    if self.supervisor.has(name)
                )
                raise Stuck(
                    f"within {patience(limit_s):.0f} s it did not come to this: {what} ({lines})"
                )
            time.sleep(TICK_S * 5)

    def sample(self) -> None:
        """Memory and processor time of every process."""
        found = broker.find(connect.broker_dir(self.run))
        pids = {
            name: self.supervisor.pid(name)
            for name in self._wanted
            if name != BROKER and self.supervisor.has(name)
        }
        for name, pid in {
            **pids,
            **({"broker (Kafka)": found.process.pid} if found else {}),
        }.items():
            with contextlib.suppress(psutil.Error):
                process = self._watched.setdefault(pid, psutil.Process(pid))
                spent = process.cpu_times()
                size = process.memory_info().rss
                now_s = time.monotonic() - self.seen.started_s
                self.seen.samples.append(
                    Sample(now_s, name, pid, size / 2**20, spent.user + spent.system)
                )

    def steps(self) -> list[float]:
        """When each batch came to the learner, monotonic."""
        return [time_s for _, time_s in noted(self.run.directory)]

    def answers(self) -> bool:
        return broker.running_address(connect.broker_dir(self.run)) is not None

    # ---- what is done to it ----------------------------------------------------------------------

    def start(self, seconds: float) -> None:
        self._sample_s = min(max(seconds / SAMPLES, 0.5), 5.0)
        self.until(self.answers, "the broker answers")
        topic_changes.apply(self.run, connect.client_settings(self.run))
        self._wanted += known.parts(self.run)
        self.until(lambda: len(self.steps()) >= 2, "two batches have come")
        self.seen.started_s = time.monotonic()

    def happen(self, what: str, over: Callable[[], object]) -> None:
        """Note an incident whose cause is gone once `over` has returned, and wait for the batch
        after it.
        """
        start_s = time.monotonic()
        over()
        self.seen.incidents.append(Incident(what, start_s, over_s := time.monotonic()))
        self.until(lambda: self.steps()[-1] > over_s, f"a batch after this: {what}")

    def restart_broker(self) -> None:
        """SIGKILL, as `make chaos` does it."""
        found = broker.find(connect.broker_dir(self.run))
        assert found is not None
        found.process.kill()
        self.until(lambda: not found.alive(), "the broker is gone")
        self.until(self.answers, "the broker answers again")

    def fill_disk(self, seconds: float) -> None:
        """Full for so long, and at least until the learner has said so."""
        log = self.supervisor.log_path("learner")
        start_s = time.monotonic()
        before = log.stat().st_size

        def is_full() -> bool:
            # An old version that the learner removes makes room for the next one.
            self.disk.fill()
            return self.find_said(log, before)

        try:
            self.until(is_full, "the learner says that the weight store is full")
            self.rest_until(start_s + seconds - self.seen.started_s)
        finally:
            self.disk.clear()

    def set_clock(self, offset_s: float) -> None:
        """A step, and a batch under the new time."""
        now_s = time.monotonic()
        self.clock.set(offset_s)
        self.until(lambda: self.steps()[-1] > now_s, "a batch after a step of the clock")

    def find_said(self, log: Path, before: int) -> bool:
        lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
        self.seen.said = next((line for line in lines if "is full" in line), "")
        return bool(self.seen.said)

    def go_through(self, seconds: float, progress: OnProgress) -> None:
        """All that is planned, in its order. What something takes comes on top of the time: what is
        planned behind it keeps its distance.
        """
        plan: list[tuple[float, Callable[[], object]]] = [
            *((at, lambda: self.happen("broker killed", self.restart_broker)) for at in BROKER_AT),
            (
                DISK_AT,
                lambda: self.happen(
                    "weight store full", lambda: self.fill_disk(min(DISK_S, seconds * DISK_FRAC))
                ),
            ),
            (CLOCK_AT[0], lambda: self.set_clock(STEP_S)),
            (CLOCK_AT[1], lambda: self.set_clock(0.0)),
            (1.0, lambda: None),
        ]
        taken_s = 0.0
        for number, (at, do) in enumerate(plan):
            self.rest_until(at * seconds + taken_s)
            before_s = time.monotonic()
            do()
            taken_s += time.monotonic() - before_s
            progress(number + 1, len(plan))

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self, log: KafkaLog) -> None:
        """The producers stop, the others work off what there is, then everybody but the broker
        stops.
        """
        self.seen.seconds = time.monotonic() - self.seen.started_s
        self.stop([name for name in known.parts(self.run) if name.startswith("env-")])
        self.until(lambda: all_read(log, self.run), "the buffer has read every rollout")
        self.until(lambda: time.monotonic() > self.steps()[-1] + QUIET_S, "no batch comes any more")
        self.stop([name for name in self._wanted if name != BROKER])

    def stop(self, names: list[str]) -> None:
        self._wanted = [name for name in self._wanted if name not in names]
        self.supervisor.stop(names)


def all_read(log: KafkaLog, run: RunFile) -> bool:
    """Has the buffer taken every rollout? Behind the last one lies the marker of its
    transaction.
    """
    done = log.committed_offsets("buffer")
    return all(
        end_offset(log, topology.rollouts(env), p) - done.get((topology.rollouts(env), p), 0) <= 1
        for env in run.envs
        for p in range(run.topics.partitions)
    )


@contextlib.contextmanager
def soaked(
    run: RunFile, seconds: float, progress: OnProgress = no_progress
) -> Iterator[tuple[Soak, KafkaLog]]:
    """A run that has gone through all of it and come to rest. Its broker is up for as long as the
    block lasts.
    """
    with run_directory.lock_run_dir(run, fresh=True):
        soak = Soak(run)
        try:
            soak.start(seconds)
            soak.go_through(seconds, progress)
            log = KafkaLog(connect.client_settings(run), run.run)
            soak.drain(log)
            yield soak, log
        finally:
            soak.close()
