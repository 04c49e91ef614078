"""One learner as two JAX processes on a real broker: started by hand as a user does, stopped, and
gone on with.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from safetensors.numpy import load_file

from streamrl.batcher.assemble import Sharding, assemble
from streamrl.cli.command import cli
from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.learner.files import checkpoints
from streamrl.learner.files.export import WEIGHTS, state_dict
from streamrl.learner.inputs import read_existing
from streamrl.learner.parallel import distributed
from streamrl.learner.trainer import open_trainer
from streamrl.run.monitoring.frame import Frame
from streamrl.run.orchestrator.liveness import BrokerWatch, Liveness
from streamrl.run.orchestrator.parts import SupervisedParts
from streamrl.run.orchestrator.run_directory import write_run_file
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Batch, Metric, PolicyVersion
from streamrl.weights.pull import pull
from tests.support.build import group
from tests.support.waiting import patience, until

ROOT = Path(__file__).parents[3]
PATIENCE_S = patience(300.0)
ALL = ["--coordinator", "127.0.0.1:1", "--processes", "2", "--index", "1"]
# of weights after four steps: Adam's first steps are as large for a small gradient as for a large
# one
TOLERANCE = 1e-4


def run_of(directory: Path, name: str) -> RunFile:
    tiny = {"layers": 1, "hidden": 16, "head_dim": 8, "seed": 1}
    batcher = {
        "total_token_budget": 48,
        "max_seq_len": 16,
        "row_count": 4,
        "processes": 2,
        "balance": "flops",
    }
    return parse(
        {
            "run": name,
            "runs_dir": str(directory),
            "envs": {"copy": {}},
            "buffer": {"group_size": 2, "max_age": 0},
            "batcher": batcher,
            "model": {"max_seq_len": 16, "tiny": tiny},
            "learner": {
                "checkpoint_every": 2,
                "probe_tokens": 8,
                "loss": "grpo",
                "kl": {"reference": {"every": 2}},
            },
        }
    )


def batch(number: int) -> Batch:
    """Three rollouts for each of two processes, in tokens 10 to 15 of a model of 16."""
    groups = [
        group(
            "copy", f"g{number}-{i}", sizes=(2 - i, 3, 1 + i), prompt=2 + number % 2, version=number
        )
        for i in range(2)
    ]
    made = assemble(groups, number, number, 4, 16, Sharding(2, "flops", 16))
    assert made is not None
    return made


class Learner:
    """Its two processes."""

    def __init__(self, run: RunFile, broker: str, logs: Path) -> None:
        path = logs / "run.yaml"
        path.write_text(yaml.safe_dump(run.model_dump(mode="json")))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "STREAMRL_KAFKA": broker}
        command = [
            sys.executable,
            "-m",
            "streamrl.cli",
            "learner",
            str(path),
            "--coordinator",
            coordinator,
            "--processes",
            "2",
            "--index",
        ]
        self.logs = [logs / f"process-{i}.log" for i in range(2)]
        self.processes = list[subprocess.Popen[bytes]]()
        for i, log in enumerate(self.logs):
            with log.open("ab") as output:
                self.processes.append(
                    subprocess.Popen(
                        [*command, str(i)], cwd=ROOT, env=environment, stdout=output, stderr=output
                    )
                )

    def said(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs
        )


@contextmanager
def learning(run: RunFile, broker: str, logs: Path) -> Iterator[Learner]:
    learner = Learner(run, broker, logs)
    try:
        yield learner
    finally:
        for process in learner.processes:
            process.kill()
            process.wait()


def versions(log: KafkaLog) -> list[PolicyVersion]:
    events = (to_event(message, ("policy-version",)) for message in read(log, "policy-versions", 0))
    return [event.record for event in events if isinstance(event.record, PolicyVersion)]


def until_version(learner: Learner, log: KafkaLog, version: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while max((found.version for found in versions(log)), default=-1) < version:
        assert all(process.poll() is None for process in learner.processes), learner.said()
        assert time.monotonic() < deadline, learner.said()
        time.sleep(0.2)


def publish(log: KafkaLog, number: int) -> None:
    writer = log.producer()
    writer.send(to_message(Output("batches", str(number), batch(number))))
    writer.flush(PATIENCE_S)
    writer.close()


@pytest.mark.slow
def test_two_processes_are_one_learner(broker: str, run_name: str, tmp_path: Path):
    """The second life is asked to end by one of them alone. Its weights are those of one process,
    but for the order of sums.
    """
    run = run_of(tmp_path / "runs", run_name)
    kafka = {"bootstrap.servers": broker}
    run.directory.mkdir(parents=True)
    topic_changes.apply(run, kafka)
    log = KafkaLog(kafka, run.run)
    for number in range(3):
        publish(log, number)
    with learning(run, broker, tmp_path) as learner:
        until_version(learner, log, 3)
        for process in learner.processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE_S) for process in learner.processes] == [0, 0], learner.said()
    assert checkpoints.versions(run.directory / "checkpoints" / "lead") == [2, 3]

    publish(log, 3)
    with learning(run, broker, tmp_path) as learner:
        until_version(learner, log, 4)
        learner.processes[1].send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE_S) for process in learner.processes] == [0, 0], learner.said()
    announced = versions(log)
    assert [(found.version, found.batch) for found in announced] == [
        (0, None),
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
    ]
    # A clean stop has written a checkpoint, so no batch is trained on twice.
    assert "resumed version 3" in learner.said()
    assert checkpoints.versions(run.directory / "checkpoints" / "lead") == [3, 4]

    measured = [to_event(m, ("metric",)).record for m in read(log, "metrics", 0)]
    # the log's own are of no step
    steps = [
        record.step for record in measured if isinstance(record, Metric) and record.step is not None
    ]
    assert steps == [0, 1, 2, 3]  # one process measures

    alone = run.model_copy(update={"runs_dir": str(tmp_path / "alone")})
    alone.directory.mkdir(parents=True)
    with open_trainer(alone) as policy:
        for taken in read_existing(log, False, 0, 0):
            policy.step(taken)
            if policy.version == 4:
                break
        ours = state_dict(policy.state.model)
    log.close()
    theirs = load_file(pull(announced[4], run.store, tmp_path / "copy") / WEIGHTS)
    worst = max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
    print(f"two processes: weights at most {worst:.1e} from those of one, after four steps")
    assert ours.keys() == theirs.keys() and worst <= TOLERANCE


class Said:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.lines = list[str]()

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, frame: Frame) -> None: ...

    def close(self) -> None: ...


@pytest.mark.slow
def test_up_starts_both_again_when_one_is_killed(
    broker: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They go on from the newest checkpoint, and announce nothing twice."""
    made = run_of(tmp_path / "runs", run_name).model_dump(mode="json")
    kafka = {"bootstrap.servers": broker}
    run = parse(
        {
            **made,
            "kafka": kafka,
            "metrics": {"serve": False},
            "learner": {**made["learner"], "processes": 2},
        }
    )
    run.directory.mkdir(parents=True)
    write_run_file(run)
    topic_changes.apply(run, kafka)
    log = KafkaLog(kafka, run.run)
    monkeypatch.setattr(topology, "parts", topology.learner_parts)
    supervisor = Supervisor(tmp_path / "logs", {**os.environ, "JAX_PLATFORMS": "cpu"})
    said = Said()
    logs = [supervisor.log_path(name) for name in ("learner-0", "learner-1")]

    def trained(version: int) -> bool:
        assert supervised.keep_running(said) is None, said.lines
        return max((found.version for found in versions(log)), default=-1) >= version

    try:
        with Liveness(run, topology.identities(run)) as lives:
            supervised = SupervisedParts(
                run, supervisor, lives, BrokerWatch(log), topology.parts(run)
            )
            for number in range(3):
                publish(log, number)
            until(lambda: trained(3), PATIENCE_S)
            # It is written beside the steps, and may be complete only after version 3.
            kept = run.directory / "checkpoints" / "lead"
            until(lambda: 2 in checkpoints.versions(kept), PATIENCE_S)
            before = [supervisor.pid("learner-0"), supervisor.pid("learner-1")]
            os.kill(before[1], signal.SIGKILL)
            publish(log, 3)
            until(lambda: trained(4), PATIENCE_S)
            after = [supervisor.pid("learner-0"), supervisor.pid("learner-1")]
    finally:
        supervisor.close(limit_s=patience(30.0))
    assert not {*before} & {*after}
    assert [(found.version, found.batch) for found in versions(log)] == [
        (0, None),
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
    ]
    assert all("resumed version 2" in path.read_text() for path in logs)
    log.close()


def test_they_go_from_batch_to_batch_together_until_one_is_to_stop(monkeypatch: pytest.MonkeyPatch):
    """Two processes in two threads. One sees the batches later, the other is to stop once it has
    the third: neither has it.
    """
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    said = [np.zeros(2, bool)] * 2
    here = threading.local()

    def gather(mine: np.ndarray) -> np.ndarray:
        said[here.process] = mine
        meeting.wait()
        everyone = np.stack(said)
        meeting.wait()
        return everyone

    monkeypatch.setattr(distributed, "process_allgather", gather)
    stop = threading.Event()
    had = [list[int](), list[int]()]

    def found(process: int) -> Iterator[int | None]:
        for number in (10, 11, 12):
            yield from [None] * (3 * process)
            if process == 0 and number == 12:
                stop.set()
            yield number

    def work(process: int) -> None:
        here.process = process
        had[process] += distributed.synchronized(
            found(process), stop if process == 0 else threading.Event()
        )

    other = threading.Thread(target=work, args=(1,))
    other.start()
    work(0)
    other.join(PATIENCE_S)
    assert had == [[10, 11], [10, 11]]


@pytest.mark.parametrize(
    "options",
    [["--index", "0"], ["--coordinator", "127.0.0.1:1", "--processes", "2"], [*ALL[:-1], "2"]],
)
def test_a_place_is_said_as_a_whole(options: list[str]):
    result = CliRunner().invoke(cli, ["learner", "quickstart", *options])
    assert (
        result.exit_code == 2
        and "--coordinator, --processes and --index belong together" in result.output
    )
