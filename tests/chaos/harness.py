"""Runs a data path, kills it as planned, lets it come to rest. The parts and the broker are
processes under the project's own supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kafka import KafkaAdminClient

from streamrl.config import topology
from streamrl.config.run_file import RUN_FILE, RunFile
from streamrl.extensions.recordings.progress import OnProgress, no_progress
from streamrl.run.orchestrator import run_directory
from streamrl.run.orchestrator.plan import BROKER, FATAL
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.stream.local_kafka import broker, connect
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import TopicPartition
from tests.chaos import known
from tests.chaos.part import note_of
from tests.chaos.plan import Kill
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
TICK_S = 0.02
BACKOFF_S = 0.3  # after an end that nobody planned
PATIENCE_S = 120.0  # for whatever must come
LOOKS_S = 0.02  # on average between two looks whether a victim is where it is to be hit
HALT_S = 5.0  # until SIGSTOP has worked
QUIET_S = 2.0  # without a record: the run has come to rest
ASIDE = (topology.JOURNAL, topology.DEMAND, topology.METRICS)  # kinds that do not count for that
# states of a transaction that readers still wait for
OPEN = {"Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"}


class Stuck(Exception):
    """The run did not go on as it must."""


@dataclass
class Struck:
    """What was done to a run."""

    kills_by_role: Counter[str] = field(default_factory=Counter[str])
    # kills in an open transaction, by role; as the broker said
    inside: Counter[str] = field(default_factory=Counter[str])
    # part, from the broker's return to its next commit
    returns_s: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    # from a part's death to the first commit of its next life
    restarts_s: list[float] = field(default_factory=list[float])
    seconds: float = 0.0


class Harness:
    """A run and whoever works on it. From the main thread only: nothing outlives it."""

    def __init__(self, run: RunFile, logs: str) -> None:
        self.run, self.parts, self._kind = run, known.parts(run), logs
        environment = {
            name: value for name, value in os.environ.items() if name != "STREAMRL_KAFKA"
        }
        self.supervisor = Supervisor(
            run.directory / "logs", {**environment, "PYTHONPATH": str(ROOT)}
        )
        (run.directory / "notes").mkdir()
        self.notes = {name: note_of(run, name) for name in self.parts}
        self._wanted: list[str] = [BROKER]
        # process and time, of those that have not committed since
        self._killed: dict[str, tuple[int, float]] = {}
        self.struck = Struck()

    @property
    def log(self) -> KafkaLog:
        return KafkaLog(connect.client_settings(self.run), self.run.run)

    def start(self) -> None:
        self.until(self.broker_answers, "the broker answers")
        topic_changes.apply(self.run, connect.client_settings(self.run))
        self._wanted += self.parts

    def close(self) -> None:
        self.supervisor.close(limit_s=5.0)

    # ---- supervision -----------------------------------------------------------------------------

    def tick(self) -> None:
        """Start what is not running, and note who is well again."""
        self.supervisor.notice_exits()
        observed = self.supervisor.observe()
        now = time.monotonic()
        for name in self._wanted:
            ends = observed[name].ends if name in observed else ()
            if name in observed and observed[name].running:
                if (
                    name in self._killed
                    and self._killed[name][0] != self.supervisor.pid(name)
                    and self.commits(name)
                ):
                    self.struck.restarts_s.append(time.monotonic() - self._killed.pop(name)[1])
            elif (
                not ends
                or ends[-1].exit_code == -signal.SIGKILL
                or now > ends[-1].time_s + BACKOFF_S
            ):
                if ends and ends[-1].exit_code in FATAL:
                    raise Stuck(
                        f"{name} has given up with exit code {ends[-1].exit_code}:"
                        f" {self.supervisor.last_line(name)}"
                    )
                self.supervisor.start(name, self._command(name))

    def _command(self, name: str) -> list[str]:
        file = str(self.run.directory / RUN_FILE)
        return [
            sys.executable,
            "-m",
            *(
                ("streamrl.cli", BROKER, file)
                if name == BROKER
                else ("tests.chaos.part", file, name, self._kind)
            ),
        ]

    def rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.tick()
            time.sleep(min(left, TICK_S))

    def until(self, true: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience(limit_s)
        while True:
            self.tick()
            if true():
                return
            if time.monotonic() > deadline:
                self.ask_where()
                lines = "; ".join(
                    f"{name}: {self.supervisor.last_line(name)}"
                    for name in self._wanted
                    if self.supervisor.has(name)
                )
                raise Stuck(
                    f"within {patience(limit_s):.0f} s it did not come to this: {what} ({lines})"
                )
            time.sleep(TICK_S)

    def ask_where(self) -> None:
        """Every part writes to its log where it is."""
        for name in self.parts:
            if self.supervisor.has(name) and self.supervisor.observe()[name].running:
                os.kill(self.supervisor.pid(name), signal.SIGUSR1)
        time.sleep(0.5)

    def commits(self, name: str) -> int:
        """Of its present life."""
        note = self.notes[name]
        return (
            note.commits
            if self.supervisor.has(name) and note.pid == self.supervisor.pid(name)
            else 0
        )

    def everybody_works(self) -> bool:
        return all(self.commits(name) for name in self.parts)

    def broker_answers(self) -> bool:
        return broker.running_address(connect.broker_dir(self.run)) is not None

    # ---- kills -----------------------------------------------------------------------------------

    def kill(self, kill: Kill, draw: Random) -> None:
        """One kill as planned. The next one may come before the victim is back."""
        if kill.part == BROKER:
            self.until(self.everybody_works, "every part has committed since its last start")
            self.rest(kill.pause_s)
            self.kill_broker()
        else:
            self.until(
                lambda: self.commits(kill.part), f"{kill.part} has committed since its last start"
            )
            self.rest(kill.pause_s)
            self.kill_part(kill, draw)
        self.struck.kills_by_role[known.role(kill.part)] += 1

    def kill_part(self, kill: Kill, draw: Random) -> None:
        """Make it stand still, look where it is, and kill it, or let it go on and look again."""
        name = kill.part
        deadline = time.monotonic() + patience(PATIENCE_S)
        while time.monotonic() < deadline:
            if self.supervisor.observe()[name].running and halt(pid := self.supervisor.pid(name)):
                if self.commits(name) and (self.notes[name].open or not kill.inside):
                    inside = self.is_open(name)
                    if inside or not kill.inside:
                        os.kill(pid, signal.SIGKILL)
                        self._killed[name] = pid, time.monotonic()
                        self.struck.inside[known.role(name)] += inside
                        return
                os.kill(pid, signal.SIGCONT)
            self.rest(draw.expovariate(1 / LOOKS_S))
        raise Stuck(
            f"{name} was never found with a transaction open: {self.supervisor.last_line(name)}"
        )

    def is_open(self, name: str) -> bool:
        """Has this part, which stands still, something in the log that is not decided yet? The
        broker knows; without transactions its own note.
        """
        if self._kind == "no-transactions" or not self.notes[name].open:
            return self.notes[name].open
        identity = (
            f"{self.run.run}.{'learner-' + self.run.learner.name if name == 'learner' else name}"
        )
        admin = KafkaAdminClient(
            bootstrap_servers=connect.client_settings(self.run)["bootstrap.servers"]
        )
        try:
            return (
                str(getattr(admin.describe_transactions([identity])[identity].state, "value", ""))
                in OPEN
            )
        finally:
            admin.close()

    def kill_broker(self) -> None:
        """Kill the broker, wait for the next one, and measure how long after its return each part
        commits again.
        """
        home = connect.broker_dir(self.run)
        found = broker.find(home)
        assert found is not None
        found.process.kill()
        self.until(lambda: not found.alive(), "the broker is gone")
        self.until(self.broker_answers, "the broker answers again")
        returned = time.monotonic()
        before = {name: (self.notes[name].pid, self.notes[name].commits) for name in self.parts}
        waiting = list(self.parts)

        def note() -> bool:
            for name in [
                name
                for name in waiting
                if self.commits(name)
                and (self.notes[name].pid, self.notes[name].commits) != before[name]
            ]:
                self.struck.returns_s.append((name, time.monotonic() - returned))
                waiting.remove(name)
            return not waiting

        self.until(note, "every part commits after the broker's return")

    def restart(self, name: str) -> int:
        """SIGTERM, as a rollout of another version of the code does it; then it must commit in its
        next life. Returns its exit code.
        """
        self.until(lambda: self.commits(name), f"{name} has committed since its last start")
        pid = self.supervisor.pid(name)
        os.kill(pid, signal.SIGTERM)
        self.until(
            lambda: self.supervisor.pid(name) != pid, f"{name} has ended and is started again"
        )
        self.until(lambda: self.commits(name), f"{name} commits again")
        return self.supervisor.observe()[name].ends[-1].exit_code

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """The envs stop, the others work off what they can, then everybody but the broker stops.

        A part that waits commits a step a second, because its clock is part of its state. So what
        counts is that nothing is written but journals, demand and metrics.
        """
        self.until(self.everybody_works, "every part has committed since its last start")
        envs = [name for name in self.parts if known.role(name) == "env"]
        self._wanted = [name for name in self._wanted if name not in envs]
        self.supervisor.stop(envs)
        seen: list[tuple[float, dict[TopicPartition, int]]] = []
        log = self.log
        written = [
            (topic, partition)
            for topic, partitions in log.topics().items()
            if topology.kind_of(topic) not in ASIDE
            for partition in range(partitions)
        ]

        def quiet() -> bool:
            seen.append((time.monotonic(), log.end_offsets(written)))
            return any(
                ends == seen[-1][1] and time_s < seen[-1][0] - QUIET_S for time_s, ends in seen
            )

        self.until(quiet, "nobody writes any more")
        self._wanted = [BROKER]
        self.supervisor.stop_all(exclude=(BROKER,))


def halt(pid: int) -> bool:
    """SIGSTOP, and wait until it stands. False when it has ended by itself."""
    os.kill(pid, signal.SIGSTOP)  # it has not been waited for, so the number is still its own
    deadline = time.monotonic() + patience(HALT_S)
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        if state == "Z":
            return False
        if time.monotonic() > deadline:
            raise Stuck(
                f"process {pid} does not stand still {patience(HALT_S):.0f} s after SIGSTOP but is"
                f" in state {state}"
            )
        time.sleep(0.0002)
    return True


@contextlib.contextmanager
def struck(
    run: RunFile,
    kills: Sequence[Kill],
    seed: int,
    logs: str = "transactions",
    progress: OnProgress = no_progress,
) -> Iterator[Harness]:
    """A run that was killed as planned and has come to rest. Its broker is up for as long as the
    block lasts.
    """
    with at_work(run, logs) as harness:
        started = time.monotonic()
        draw = Random(seed)
        for number, kill in enumerate(kills):
            harness.kill(kill, draw)
            progress(number + 1, len(kills))
        harness.drain()
        harness.struck.seconds = time.monotonic() - started
        yield harness


@contextlib.contextmanager
def at_work(run: RunFile, logs: str = "transactions") -> Iterator[Harness]:
    """A run that goes on for as long as the block lasts."""
    with run_directory.lock_run_dir(run, fresh=True):
        harness = Harness(run, logs)
        try:
            harness.start()
            yield harness
        finally:
            harness.close()
