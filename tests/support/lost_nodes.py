"""A run on several nodes of an engine, some of which are lost in the middle: it is continued
elsewhere, and its account balances. Learner and envs are known functions.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from streamrl.config import run_file, topology
from streamrl.stream.local_kafka import broker
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Offsets, end_offset
from streamrl.system.errors import StreamrlError
from tests.chaos import known
from tests.chaos.__main__ import interrupt
from tests.chaos.verdict import verdict
from tests.support.stage import STAGE
from tests.support.waiting import patience, until

ROOT = Path(__file__).parents[2]
STEPS_BETWEEN = 30  # before a node is lost
LIMIT_S = 600.0  # for a job to run elsewhere
REST_S = 15.0  # without a record: nothing is on its way any more


class Cluster(Protocol):
    """The nodes of an engine. Commands find it by `environment`."""

    environment: dict[str, str]

    def jobs(self) -> dict[str, str]:
        """State and node of each job, by its name."""
        ...

    def kill_node(self, node: str) -> int:
        """Kill whatever runs on a node, as its end would. Returns the number of processes."""
        ...

    def start_node(self, node: str) -> None: ...


class Loss(NamedTuple):
    """A node that was lost, and what became of its job."""

    machine: str
    node: str
    processes: int
    step: int  # of the run at the loss
    steps_meanwhile: int  # until the job ran elsewhere
    next_node: str
    next_start_s: float
    next_steps_s: float  # until the run had made two steps with the job elsewhere


class Run:
    """A run that `streamrl up --on ENGINE` has submitted."""

    def __init__(self, engine: str, cluster: Cluster, file: Path, log: KafkaLog) -> None:
        self._engine = engine
        self._cluster = cluster
        self._log = log
        self.settings = run_file.load(file)
        self._file = file
        self._output = file.with_name("up.log")
        self._steps = 0
        self._halted: list[psutil.Process] = []
        self.up = self._start()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [*STAGE, "up", self._file, "--on", self._engine, *options],
                env=self._cluster.environment,
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )

    def steps(self) -> int:
        """Steps that the learner has announced, as far as the broker has an answer. Each version
        has a record and the end of its transaction.
        """
        with contextlib.suppress(StreamrlError):
            if topology.POLICY_VERSIONS in self._log.topics():
                end = end_offset(self._log, *topology.POLICY_VERSIONS_PARTITION)
                self._steps = max(0, end // 2 - 1)
        return self._steps

    def wait(self, true: Callable[[], object], what: str) -> None:
        """Wait for an event in the run while it is followed."""

        def happened() -> object:
            assert self.up.poll() is None, f"the run ended ({self.up.returncode}): {self._output}"
            return true()

        until(happened, LIMIT_S, lambda: f"{what}; {self._cluster.jobs()}", every_s=0.5)

    def lose_node(self, machine: str) -> Loss:
        """Kill the node of a machine's job, and wait until the job runs on another and the run
        trains.
        """
        name = self.job(machine)
        node = self._cluster.jobs()[name].removeprefix("RUNNING ")
        step = self.steps()
        processes = self._cluster.kill_node(node)
        lost_s = time.monotonic()

        def elsewhere() -> str:
            state, _, now = self._cluster.jobs().get(name, "").partition(" ")
            return now if state == "RUNNING" and now != node else ""

        self.wait(elsewhere, f"{name} on another node than {node}")
        started_s = time.monotonic() - lost_s
        next_node = elsewhere()
        meanwhile = self.steps()
        self.wait(lambda: self.steps() >= meanwhile + 2, "two more steps")
        self._cluster.start_node(node)
        return Loss(
            machine=machine,
            node=node,
            processes=processes,
            step=step,
            steps_meanwhile=meanwhile - step,
            next_node=next_node,
            next_start_s=started_s,
            next_steps_s=time.monotonic() - lost_s,
        )

    def come_to_rest(self) -> None:
        """End the envs while what would start them again is halted, and wait until what they have
        made is trained on. The machine has to stay: the end of one ends the run.
        """
        for machine in followers(self._file):
            machine.suspend()
            self._halted.append(machine)
            for part in machine.children(recursive=True):
                part.terminate()
        self.wait(at_rest(self._log), "rest")

    def stop(self) -> int:
        self.up.send_signal(signal.SIGINT)
        for machine in self._halted:
            until(lambda machine=machine: is_told_to_end(machine), LIMIT_S, "SIGTERM", 0.1)
            machine.resume()
        return self.up.wait(LIMIT_S)

    def again(self) -> int:
        """The exit code of a second life that finds that it is done."""
        self.up = self._start("--resume", "--set", "orchestrator.max_steps=1")
        return self.up.wait(LIMIT_S)

    def job(self, machine: str) -> str:
        return f"streamrl.{self.settings.run}.{machine}"

    def end(self) -> None:
        """End `up`, if it is still there, and have it end its jobs, halted ones too."""
        for machine in self._halted:
            with contextlib.suppress(psutil.Error):
                machine.resume()
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.up.wait(patience(30))
        self.up.kill()


def followers(file: Path) -> Iterator[psutil.Process]:
    """The processes that run the parts of each machine but the leading one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            joins = any(word.startswith("--only") for word in line)
            if joins and {"up", str(file)} <= set(line) and "guarded" not in line:
                yield process


def is_told_to_end(process: psutil.Process) -> bool:
    """Whether a halted process will end as soon as it is continued."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("ShdPnd:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def at_rest(log: KafkaLog) -> Callable[[], bool]:
    """Whether nothing of a run is on its way any more, each time that it is asked."""
    kinds = (topology.ROLLOUTS, topology.GROUPS, topology.BATCHES, topology.POLICY_VERSIONS)
    written = [
        (topic, partition)
        for topic, partitions in log.topics().items()
        if topology.kind_of(topic) in kinds
        for partition in range(partitions)
    ]
    ends: Offsets = {}
    since_s = 0.0

    def asked() -> bool:
        nonlocal ends, since_s
        with contextlib.suppress(StreamrlError):
            now = log.end_offsets(written)
            if now != ends:
                ends = now
                since_s = time.monotonic()
        return time.monotonic() - since_s > REST_S

    return asked


def prove(
    engine: str,
    directory: Path,
    start: Callable[[Path], AbstractContextManager[Cluster]],
    placement: Mapping[str, Any],
    lost: Sequence[str] = ("samples", "trains"),
) -> None:
    """Run on an engine's nodes, lose those of the machines `lost`, and exit with 1 when one is not
    continued elsewhere, or the run's account does not balance.
    """
    signal.signal(signal.SIGTERM, interrupt)  # nothing may be left running
    directory = directory.absolute()
    directory.mkdir(parents=True)
    kafka = broker.start(directory / "kafka")
    log = KafkaLog({"bootstrap.servers": kafka.address}, "run")
    losses: list[Loss] = []
    try:
        with start(directory / engine) as cluster:
            # All nodes are this host, which a run on several machines would be warned of.
            cluster.environment["STREAMRL_KAFKA"] = f"127.1:{kafka.port}"
            run = Run(engine, cluster, written(directory, placement), log)
            try:
                for machine in lost:
                    step = run.steps() + STEPS_BETWEEN
                    run.wait(lambda step=step: run.steps() >= step, f"step {step}")
                    losses.append(run.lose_node(machine))
                    print(losses[-1], flush=True)
                run.come_to_rest()
                stopped = run.stop()
                left = cluster.jobs()
                found = verdict(log, run.settings)
                again = run.again()
            finally:
                run.end()
    finally:
        kafka.stop()
    show(losses)
    print(f"rollouts {found.rollouts}, batches {found.batches}, versions {found.versions}")
    print(f"lost {found.lost}, trained twice {found.trained_twice}, otherwise {found.wrong} faults")
    print(f"audit balanced: {found.audit_balanced}; replay identical: {found.batches_identical}")
    print(f"Ctrl-C: exit code {stopped}, jobs left {len(left)}; a second life at its end: {again}")
    for fault in found.faults:
        print(fault)
    sys.exit(0 if found.clean and stopped == 130 and not left and again == 0 else 1)


def written(directory: Path, placement: Mapping[str, Any]) -> Path:
    """The run file of a chaos run on these machines. Nothing serves."""
    settings = known.run_file(directory / "run").model_dump(mode="json")
    settings["inference"]["replicas"] = 0
    settings["placement"] = dict(placement)
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def show(losses: list[Loss]) -> None:
    table = Table("lost node of", "processes", "at step", "elsewhere after", "steps meanwhile")
    table.add_column("two more steps after")
    for lost in losses:
        table.add_row(
            f"{lost.machine}: {lost.node} to {lost.next_node}",
            str(lost.processes),
            str(lost.step),
            f"{lost.next_start_s:.0f} s",
            str(lost.steps_meanwhile),
            f"{lost.next_steps_s:.0f} s",
        )
    Console(width=120).print(table)
