"""Runs parts on a cluster, does to the brokers what is planned, and measures how long each part
commits nothing meanwhile. From the main thread only: nothing outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from streamrl.config import topology
from streamrl.config.run_file import RUN_FILE, RunFile
from streamrl.run.orchestrator import run_directory
from streamrl.run.orchestrator.plan import Abort, decide
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.stream.local_kafka.cluster import Node
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import TopicPartition
from streamrl.stream.log.retrying import PATIENCE_S
from tests.chaos.harness import ASIDE, QUIET_S, ROOT, TICK_S, Stuck
from tests.chaos_cluster import control
from tests.chaos_cluster.brokers import Brokers
from tests.chaos_cluster.known import QUIZ, TALK, CountingStub, heard, run_file
from tests.support.waiting import patience

WRITERS = ("learner", "buffer", "batcher", f"env-{TALK}-0", f"env-{QUIZ}-0")
PARTS = (*WRITERS, "orchestrator")
CONTROL = "control"
CONTROLS = 3  # producers, whose longest gap counts
CONTROL_TOPIC = "control"
WAIT_S = 120.0  # for whatever must come
IN_SYNC_S = 300.0
RECENT_S = 10.0
AWAY_S = 15.0
STOPPED_S = 20.0
QUOTA_S = 40.0
FULL_S = 35.0
TWO_AWAY_S = 30.0
LONG_AWAY_S = PATIENCE_S + 30.0
# of each client at each broker
QUOTA = (50_000, 200_000)
MARGIN_S = 3.0  # by which a gap of a part may be longer than that of a plain producer


@dataclass
class Row:
    """What came of one fault."""

    fault: str
    kills: int
    part: str = ""  # the part that was killed; empty: it was brokers
    in_sync_s: float = 0.0  # from the brokers' return on
    gaps_s: dict[str, float] = field(default_factory=dict[str, float])  # CONTROL is among them
    cores: float = 0.0  # the most that a part has used, on average
    ends: list[str] = field(default_factory=list[str])  # part and exit code
    answers: int = 0  # sampled until then
    version: int = 0  # batches trained on until then
    sampled_again: int = 0  # answers

    @property
    def excess_s(self) -> float:
        """The longest gap of a part beyond that of the plain producers."""
        return max(self.gaps_s[name] for name in WRITERS) - self.gaps_s[CONTROL]


class Harness:
    def __init__(self, run: RunFile, brokers: Brokers, stub: CountingStub) -> None:
        self.run = run
        self.brokers = brokers
        self.stub = stub
        self.rows: list[Row] = []
        self._notes = run.directory / "commits"
        self._notes.mkdir()
        environment = {n: v for n, v in os.environ.items() if n != "STREAMRL_KAFKA"}
        self.supervisor = Supervisor(
            run.directory / "logs", {**environment, "PYTHONPATH": str(ROOT)}
        )
        self._wanted = [*PARTS, CONTROL]

    @property
    def log(self) -> KafkaLog:
        return KafkaLog({"bootstrap.servers": self.brokers.address}, self.run.run)

    def close(self) -> None:
        self.supervisor.close(limit_s=5.0)

    # ---- supervision, as `streamrl up` does it ---------------------------------------------------

    def tick(self) -> None:
        self.supervisor.notice_exits()
        for action in decide(self._wanted, self.supervisor.observe(), time.monotonic()):
            if isinstance(action, Abort):
                raise Stuck(
                    f"{action.name} is not started again: {action.reason}; its last line:"
                    f" {self.supervisor.last_line(action.name)}"
                )
            self.supervisor.start(action.name, self._command(action.name))

    def _command(self, name: str) -> list[str]:
        module = f"tests.chaos_cluster.{'control' if name == CONTROL else 'part'}"
        if name == CONTROL:
            files = [str(self._notes / f"{CONTROL}-{number}") for number in range(CONTROLS)]
            return [sys.executable, "-m", module, self.brokers.address, CONTROL_TOPIC, *files]
        file = str(self.run.directory / RUN_FILE)
        return [sys.executable, "-m", module, file, name, str(self._notes / name)]

    def rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.tick()
            time.sleep(TICK_S * 5)

    def until(self, true: Callable[[], object], what: str, limit_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + patience(limit_s)
        while not true():
            self.tick()
            if time.monotonic() > deadline:
                lines = "; ".join(
                    f"{name}: {self.supervisor.last_line(name)}"
                    for name in self._wanted
                    if self.supervisor.has(name)
                )
                raise Stuck(f"not within {patience(limit_s):.0f} s: {what} ({lines})")
            time.sleep(TICK_S * 5)

    # ---- what is measured ------------------------------------------------------------------------

    def commits(self, name: str) -> list[float]:
        path = self._notes / name
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

    def everybody_commits(self, since_s: float) -> bool:
        """Whether every part and every plain producer has committed since then."""
        return all(times and times[-1] > since_s for times in self._all_commits().values())

    def _all_commits(self) -> dict[str, list[float]]:
        names = (*WRITERS, *(f"{CONTROL}-{number}" for number in range(CONTROLS)))
        return {name: self.commits(name) for name in names}

    def _gaps(self, began_s: float, ended_s: float) -> dict[str, float]:
        gaps: dict[str, float] = {}
        for name, times in self._all_commits().items():
            longest = max(
                (b - a for a, b in pairwise(times) if b > began_s and a < ended_s), default=0.0
            )
            key = CONTROL if name.startswith(CONTROL) else name
            gaps[key] = max(longest, gaps.get(key, 0.0))
        return gaps

    def _cpu_s(self) -> dict[int, float]:
        """Seconds of CPU of each part's process so far."""
        seconds: dict[int, float] = {}
        for name in PARTS:
            if self.supervisor.has(name):
                with contextlib.suppress(psutil.Error):
                    times = psutil.Process(self.supervisor.pid(name)).cpu_times()
                    seconds[self.supervisor.pid(name)] = times.user + times.system
        return seconds

    def _ends(self) -> list[str]:
        observed = self.supervisor.observe()
        return [
            f"{name} {end.exit_code}"
            for name in PARTS
            if name in observed
            for end in observed[name].ends
        ]

    # ---- faults ----------------------------------------------------------------------------------

    def suffer(self, fault: str, kills: int, harm: Callable[[], None], repair: object) -> Row:
        """Do harm to a run that is well, repair it, and measure until it is well again."""
        self.until(self.brokers.in_sync, "all copies are in sync", IN_SYNC_S)
        self.until(lambda: self.everybody_commits(time.monotonic() - RECENT_S), "everybody commits")
        row = Row(fault, kills)
        ends = len(self._ends())
        row.answers = self.stub.answers
        row.version = self.stub.newest
        again = self.stub.sampled_again
        cpu_s = self._cpu_s()
        began_s = time.monotonic()
        harm()
        used = self._cpu_s()
        seconds = time.monotonic() - began_s
        row.cores = max((used[pid] - cpu_s[pid] for pid in used.keys() & cpu_s), default=0.0)
        row.cores /= seconds
        if callable(repair):
            repair()
        repaired_s = time.monotonic()
        self.until(self.brokers.in_sync, "all copies are in sync again", IN_SYNC_S)
        row.in_sync_s = time.monotonic() - repaired_s
        since_s = time.monotonic()
        self.until(lambda: self.everybody_commits(since_s), "everybody commits again", IN_SYNC_S)
        row.gaps_s = self._gaps(began_s, time.monotonic())
        row.ends = self._ends()[ends:]
        row.sampled_again = self.stub.sampled_again - again
        self.rows.append(row)
        return row

    def nothing(self) -> Row:
        return self.suffer("none", 0, lambda: self.rest(AWAY_S), None)

    def rolling_restart(self) -> Row:
        """Each broker is asked to end, and started again once it has; the next one follows when
        all copies are in sync.
        """

        def restart() -> None:
            for node in self.brokers.nodes:
                self.brokers.stop(node)
                self.brokers.start(node)
                self.until(lambda node=node: self.brokers.answers(node), "it answers", IN_SYNC_S)
                self.until(self.brokers.in_sync, "all copies are in sync", IN_SYNC_S)

        return self.suffer("rolling restart", 0, restart, None)

    def kill_leader(self, topic: str) -> Row:
        name = f"leader of {topic}"
        return self._kill(name, lambda: [self.brokers.leader(f"{self.run.run}.{topic}")], AWAY_S)

    def kill_controller(self) -> Row:
        return self._kill("controller", lambda: [self.brokers.controller()], AWAY_S)

    def kill_two(self, away_s: float = TWO_AWAY_S) -> Row:
        return self._kill("two of three", lambda: self.brokers.nodes[:2], away_s)

    def kill_all(self, away_s: float = AWAY_S) -> Row:
        return self._kill("all three", lambda: self.brokers.nodes, away_s)

    def kill_for_long(self, topic: str, away_s: float = LONG_AWAY_S) -> Row:
        name = f"leader of {topic}, for long"
        return self._kill(name, lambda: [self.brokers.leader(f"{self.run.run}.{topic}")], away_s)

    def _kill(self, name: str, choose: Callable[[], list[Node]], away_s: float) -> Row:
        victims: list[Node] = []

        def harm() -> None:
            victims.extend(choose())
            for node in victims:
                self.brokers.kill(node)
            self.rest(away_s)

        def repair() -> None:
            for node in victims:
                self.brokers.start(node)
            for node in victims:
                self.until(lambda node=node: self.brokers.answers(node), "it answers", IN_SYNC_S)

        count = {"two of three": 2, "all three": 3}.get(name, 1)
        return self.suffer(f"kill -9: {name}, {away_s:.0f} s", count, harm, repair)

    def kill_part(self, name: str) -> Row:
        def harm() -> None:
            os.kill(self.supervisor.pid(name), signal.SIGKILL)
            self.rest(AWAY_S)

        row = self.suffer(f"kill -9: {name}", 1, harm, None)
        row.part = name
        return row

    def suspend_leader(self, topic: str) -> Row:
        node: list[Node] = []

        def harm() -> None:
            node.append(self.brokers.leader(f"{self.run.run}.{topic}"))
            self.brokers.suspend(node[0])
            self.rest(STOPPED_S)

        name = f"SIGSTOP: leader of {topic}, {STOPPED_S:.0f} s"
        return self.suffer(name, 0, harm, lambda: self.brokers.resume(node[0]))

    def quota(self) -> Row:
        def harm() -> None:
            self.brokers.limit(*QUOTA)
            self.rest(QUOTA_S)

        name = f"quota of {QUOTA[0] // 1000} and {QUOTA[1] // 1000} kB/s, {QUOTA_S:.0f} s"
        return self.suffer(name, 0, harm, self.brokers.lift_limits)

    def full_disk(self) -> Row:
        node: list[Node] = []

        def harm() -> None:
            node.append(self.brokers.fill_disk())
            self.rest(FULL_S)

        def repair() -> None:
            self.brokers.clear_disk()
            # A broker none of whose disks can be written ends.
            self.until(lambda: not node[0].alive(), "the broker has ended")
            self.brokers.start(node[0])

        return self.suffer(f"full disk, {FULL_S:.0f} s", 0, harm, repair)

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """The envs stop, the others work off what they can, then all end. Nothing more is written
        but journals, demand, metrics and the server's signs of life.
        """
        self.brokers.restore()
        self.until(self.brokers.in_sync, "all copies are in sync", IN_SYNC_S)
        envs = [name for name in PARTS if name.startswith("env-")]
        gone = {*envs, CONTROL}
        self._wanted = [name for name in self._wanted if name not in gone]
        self.supervisor.stop(gone)
        log = self.log
        written = [
            (topic, partition)
            for topic, partitions in log.topics().items()
            if topology.kind_of(topic) not in (*ASIDE, topology.SERVERS)
            for partition in range(partitions)
        ]
        seen: list[tuple[float, dict[TopicPartition, int]]] = []

        def quiet() -> bool:
            seen.append((time.monotonic(), log.end_offsets(written)))
            return any(
                ends == seen[-1][1] and time_s < seen[-1][0] - QUIET_S for time_s, ends in seen
            )

        self.until(quiet, "the run comes to rest")
        self._wanted = []
        self.supervisor.stop_all()


@contextlib.contextmanager
def at_work(directory: Path) -> Iterator[Harness]:
    """A run in `directory` on a cluster of its own, which continues for as long as the block
    lasts.
    """
    with ExitStack() as stack:
        brokers = Brokers(directory / "kafka")
        stack.callback(brokers.close)
        run = run_file(directory / "run", brokers.address)
        settings = {"bootstrap.servers": brokers.address}
        stack.enter_context(run_directory.lock_run_dir(run))
        topic_changes.apply(run, settings)
        admin = AdminClient(settings)
        futures = admin.create_topics([NewTopic(CONTROL_TOPIC, control.PARTITIONS, 3)])
        futures[CONTROL_TOPIC].result()
        stub = CountingStub()
        stack.enter_context(stub)
        harness = Harness(run, brokers, stub)
        stack.callback(harness.close)
        stack.enter_context(heard(harness.log, stub))
        harness.until(lambda: harness.everybody_commits(0.0), "everybody has committed", IN_SYNC_S)
        harness.until(lambda: stub.newest > 0, "the learner has trained", IN_SYNC_S)
        yield harness
