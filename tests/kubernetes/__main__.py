"""`python -m tests.kubernetes`: what a real Kubernetes makes of the run files, and a run on three
nodes, two of which are lost in the middle: learner and envs are known functions, or with `--tiny`
the tiny model with vLLM. Exit code 1 when a pod is not continued elsewhere, the run's account does
not balance, or the reward of the model does not rise.

It needs root, for the mounts of containers, and Go. The first call builds Kubernetes, in some ten
minutes; the run takes as many, with a model twice that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml
from confluent_kafka.admin import AdminClient
from rich.console import Console
from rich.table import Table

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log.kafka import acls, topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import end_offset
from streamrl.system.errors import StreamrlError
from tests.chaos import known
from tests.chaos.__main__ import interrupt
from tests.chaos.verdict import verdict
from tests.kubernetes import admission
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.overlays import DEPLOY, make_room, overlay, volume
from tests.support.lost_nodes import at_rest
from tests.support.secure import Secure, secure_broker
from tests.support.waiting import patience, until

ROOT = Path(__file__).parents[2]
NAMESPACE = "proof"
NODES = ("node1", "node2", "node3")
CAPACITY = {"cpu": "6", "memory": "16Gi"}
STEPS_BETWEEN = 15  # before a node is lost
CLOUD_S = 120.0  # until a cloud deletes a node that is gone
LIMIT_S = 900.0
# Over so many batches, so that the run does not end before the second node is lost.
TARGET = {"env": "copy-digits", "reward": 0.9, "batches": 300}
SMALL = DEPLOY / "kubernetes/overlays/small/run.yaml"


class Kind(NamedTuple):
    """What the parts of the run are."""

    streamrl: str  # the module that a container's command runs
    run: dict[str, Any]  # its settings, but for those of the cluster
    lost: tuple[str, ...]  # Deployments whose nodes are lost
    is_tiny: bool = False


def known_functions() -> Kind:
    """Their account is exact: what each rollout and each version has to be is known."""
    run = known.run_file(Path("runs/known")).model_dump(mode="json", exclude_unset=True)
    del run["runs_dir"]
    run["inference"] = {"replicas": 0}
    return Kind("tests.kubernetes.known_parts", run, ("learner", "batcher"))


def tiny_model() -> Kind:
    run = yaml.safe_load(SMALL.read_text())
    run["orchestrator"] = {"target": TARGET, "max_wall_s": 3600}
    return Kind("streamrl.cli", run, ("learner", "buffer"), is_tiny=True)


class Loss(NamedTuple):
    """A node that was lost, and what became of its pods."""

    lost: str
    node: str
    processes: int
    pods: list[str]
    step: int
    elsewhere_s: float  # until that pod ran on another node
    all_elsewhere_s: float  # until all pods ran, some after the node was deleted
    next_steps_s: float  # until the run had made two more steps


class Run:
    """The run that `streamrl up --on kubernetes` has applied."""

    def __init__(self, plane: ControlPlane, kind: Kind, file: Path, log: KafkaLog) -> None:
        self._plane = plane
        self._kind = kind
        self._log = log
        self._output = plane.directory / "up.log"
        with self._output.open("ab") as output:
            self.up = subprocess.Popen(
                [sys.executable, "-m", "streamrl.cli", "up", str(file), "--on", "kubernetes"],
                env=plane.environment,
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )

    def steps(self) -> int:
        """Steps that the learner has announced: each version has a record and the end of its
        transaction.
        """
        with contextlib.suppress(StreamrlError):
            return max(0, end_offset(self._log, *topology.POLICY_VERSIONS_PARTITION) // 2 - 1)
        return 0

    def running(self) -> dict[str, str]:
        """The node of each pod that runs, by its own name in a StatefulSet, else its workload's."""
        found: dict[str, str] = {}
        for pod in self._plane.pods(NAMESPACE):
            own = pod["metadata"]
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in own:
                is_numbered = "apps.kubernetes.io/pod-index" in own["labels"]
                name = own["name"] if is_numbered else own["labels"]["app.kubernetes.io/name"]
                found[name] = pod["spec"]["nodeName"]
        return found

    def wait(self, true: Callable[[], object], what: str) -> None:
        """Wait for an event in the run while it is followed."""

        def happened() -> object:
            assert self.up.poll() is None, f"the run ended ({self.up.returncode}): {self._output}"
            return true()

        until(happened, LIMIT_S, lambda: f"{what}; {self.running()}", every_s=0.5)

    def lose_node_of(self, lost: str) -> Loss:
        before = self.running()
        node = before[lost]
        pods = [name for name, where in before.items() if where == node]
        step = self.steps()
        processes = self._plane.kill_node(node)
        lost_s = time.monotonic()

        def others(names: list[str]) -> bool:
            now = self.running()
            return all(now.get(name, node) != node for name in names)

        self.wait(lambda: others([lost]), f"{lost} on another node than {node}")
        elsewhere_s = time.monotonic() - lost_s
        self.wait(lambda: time.monotonic() - lost_s > CLOUD_S, "the node to be deleted")
        self._plane.delete_node(node)
        self.wait(lambda: others(pods), f"{pods} on other nodes")
        all_elsewhere_s = time.monotonic() - lost_s
        meanwhile = self.steps()
        self.wait(lambda: self.steps() >= meanwhile + 2, "two more steps")
        next_steps_s = time.monotonic() - lost_s
        self._plane.start_node(node, CAPACITY, self._kind.streamrl)
        return Loss(lost, node, processes, pods, step, elsewhere_s, all_elsewhere_s, next_steps_s)

    def come_to_rest(self) -> int:
        """End the envs, wait until what they have made is trained on, and stop the run as a user
        would. Returns the exit code.
        """
        envs = [name.rpartition("-")[0] for name in self.running() if name.startswith("env-")]
        sets = [f"statefulset/{name}" for name in envs]
        self._plane.kubectl("-n", NAMESPACE, "scale", "--replicas=0", *sets)
        self.wait(at_rest(self._log), "rest")
        self.up.send_signal(signal.SIGINT)
        return self.up.wait(patience(120))

    def end(self) -> None:
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.up.wait(patience(30))
        self.up.kill()


@contextlib.contextmanager
def kubernetes(directory: Path) -> Iterator[ControlPlane]:
    """A control plane that is up while the block lasts."""
    plane = ControlPlane(directory)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


def prepare(
    plane: ControlPlane, directory: Path, broker: Secure, kind: Kind
) -> tuple[Path, RunFile]:
    """The overlay `small` with this broker, and what the operators of a cluster would make: users
    with their rights and Secrets, topics and volumes. Returns the run file.
    """
    small = yaml.safe_load(SMALL.read_text())
    shared = {name: small[name] for name in ("kafka", "weights", "inference", "placement")}
    settings = {**shared, **kind.run}
    # The nodes are processes of this host, on whose loopback the broker is. A run file that names
    # no other address is refused for Kubernetes; nobody answers at the second one.
    servers = f"{broker.address},streamrl-kafka-bootstrap:9093"
    settings["kafka"] = {**shared["kafka"], "bootstrap.servers": servers}
    here = overlay(directory / "overlay", "small", settings, NAMESPACE)
    run = run_file.load(here / "run.yaml")
    make_room(plane, NAMESPACE, "learner", "results", "weights")
    users = {acls.user_name(run, name): os.urandom(8).hex() for name in acls.rules(run)}
    broker.add_users(users)
    acls.apply(run, broker.admin)
    if not kind.is_tiny:
        allow_known_envs(run, broker)
    topic_changes.apply(run, broker.admin)
    secrets = {user: {"password": password} for user, password in users.items()}
    secrets["streamrl-inference"] = {"key": os.urandom(32).hex()}
    secrets["streamrl-cluster-ca-cert"] = {"ca.crt": broker.ca.read_text()}
    made = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
        for name, data in secrets.items()
    ]
    plane.apply(*made, namespace=NAMESPACE)
    return here / "run.yaml", run


def allow_known_envs(run: RunFile, broker: Secure) -> None:
    """Known functions read the version in `policy-versions`, which an env asks a server for."""
    topic = f"{run.run}.{topology.POLICY_VERSIONS}"
    rule = acls.Rule("topic", topic, ("READ",))
    users = [acls.user_name(run, f"env-{env}") for env in run.envs]
    wanted = [binding for user in users for binding in acls.bindings(user, rule)]
    admin = AdminClient(broker.admin)
    for future in admin.create_acls(wanted).values():
        future.result(patience(20))


def lose_nodes(plane: ControlPlane, directory: Path, kind: Kind) -> bool:
    """Run on three nodes, lose two of them, and show what came of it. Returns whether all is
    well.
    """
    for node in NODES:
        plane.start_node(node, CAPACITY, kind.streamrl)
    until(lambda: len(plane.ready_nodes()) == len(NODES), 60, "nodes are not ready", 0.5)
    losses: list[Loss] = []
    with secure_broker(directory / "kafka") as broker:
        file, settings = prepare(plane, directory, broker, kind)
        log = KafkaLog(broker.admin, settings.run)
        run = Run(plane, kind, file, log)
        try:
            for lost in kind.lost:
                step = run.steps() + STEPS_BETWEEN
                run.wait(lambda step=step: run.steps() >= step, f"step {step}")
                losses.append(run.lose_node_of(lost))
                print(losses[-1], flush=True)
            code = run.up.wait(patience(LIMIT_S)) if kind.is_tiny else run.come_to_rest()
            until(lambda: not plane.pods(NAMESPACE) or not run.running(), 120, "pods are left", 0.5)
        finally:
            run.end()
        show(losses)
        print(f"`up` ended with {code} after {run.steps()} steps; pods left: {len(run.running())}")
        if kind.is_tiny:
            rises = has_risen(volume(plane, NAMESPACE, "results") / settings.run / "report.json")
            return is_accounted_for(log, settings) and rises and code == 0
        found = verdict(log, settings)
    print(f"rollouts {found.rollouts}, batches {found.batches}, versions {found.versions}")
    print(f"lost {found.lost}, trained twice {found.trained_twice}, otherwise {found.wrong} faults")
    print(f"audit balanced: {found.audit_balanced}; replay identical: {found.batches_identical}")
    for fault in found.faults:
        print(fault)
    return found.clean and code == 130


def is_accounted_for(log: KafkaLog, settings: RunFile) -> bool:
    """Whether every rollout has one fate, and groups and batches come out again."""
    account = audit(log, settings)
    differences = [
        result.difference
        for part in processors_of(settings).values()
        if (result := replay(log, part)[0]).difference
    ]
    print(f"rollouts {account.published}, lost {account.lost}, two fates {account.repeated}")
    print(f"audit balanced: {account.balanced}; replay identical: {not differences}")
    for problem in [*account.problems, *differences]:
        print(problem)
    return account.balanced and not differences


def has_risen(report: Path) -> bool:
    """Whether the reward of each env is higher in the last 20 batches than in the first."""
    rises: list[bool] = []
    for name, env in json.loads(report.read_text())["envs"].items():
        first, last = env["reward_mean_first20"], env["reward_mean_last20"]
        rises.append(last > first)
        print(f"reward of {name}: {first:.3f} -> {last:.3f}")
    return all(rises)


def show(losses: list[Loss]) -> None:
    table = Table("lost node of", "its pods", "at step", "elsewhere", "all pods", "two more steps")
    for lost in losses:
        table.add_row(
            f"{lost.lost}: {lost.node}, {lost.processes} processes",
            ", ".join(lost.pods),
            str(lost.step),
            f"{lost.elsewhere_s:.0f} s",
            f"{lost.all_elsewhere_s:.0f} s",
            f"{lost.next_steps_s:.0f} s",
        )
    Console(width=140).print(table)


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("runs/kubernetes"),
    show_default=True,
    help="Of the run, and of Kubernetes; must not exist.",
)
@click.option("--only", type=click.Choice(["admission", "run"]), help="Leave out the other half.")
@click.option("--tiny", is_flag=True, help="Train the tiny model, with vLLM.")
def main(directory: Path, only: str | None, tiny: bool) -> None:
    """See what Kubernetes makes of the run files; run on three nodes, and lose two of them."""
    if os.getuid() != 0:
        sys.exit("nodes have to be started by root here")
    if ROOT.is_relative_to("/tmp"):
        sys.exit(f"each pod has a /tmp of its own, which hides {ROOT}: clone it elsewhere")
    signal.signal(signal.SIGTERM, interrupt)  # nothing may be left running
    directory = directory.absolute()
    directory.mkdir(parents=True)
    with kubernetes(directory / "kubernetes") as plane:
        for found in admission.look(plane, directory) if only != "run" else ():
            print(found, flush=True)
        kind = tiny_model() if tiny else known_functions()
        well = only == "admission" or lose_nodes(plane, directory, kind)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
