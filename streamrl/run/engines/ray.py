"""A run on Ray: an actor for each machine that `placement` names, in a placement group with a node
for each.

An actor runs `streamrl up` with the parts of its machine, which starts a part again within a
second. Ray makes an actor again on another node when its own is lost, and the parts of the others
continue meanwhile. The run ends with this process, to which Ray brings the actors' output.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.config.run_file import RunFile
from streamrl.run.engines.machines import RUN_OVER, Machine, machines, prepare
from streamrl.run.orchestrator.plan import GIB, INTERRUPTED, LEARNER_STOP_LIMIT_S
from streamrl.run.orchestrator.requests import Request
from streamrl.system.errors import StreamrlError
from streamrl.system.process_group import guarded

POLL_S = 2.0
PATIENCE_S = 30.0  # for which nothing is said of nodes that are not there; Ray says nothing at all
ANSWER_S = 10.0  # an actor that does not answer for so long has no node
CALLS = 16  # at a time, of an actor: `stop` while it runs, and what is asked again
GPUS = "CUDA_VISIBLE_DEVICES"  # Ray sets it for an actor


class MachineActor:
    """The parts of a machine, as an actor."""

    def __init__(self, machine: Machine, environment: Mapping[str, str], directory: str) -> None:
        self._machine = machine
        # Variables and directory are those of `streamrl up`, as on Slurm; the GPUs are Ray's.
        self._environment = {**environment, GPUS: os.environ.get(GPUS, "")}
        self._directory = directory
        self._stopped = False
        self._child: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        return self._machine.name  # Ray puts it before each line of output

    def run(self, node: str, again: bool) -> int:
        """The exit code of the parts, when they have ended. `again`: they ran elsewhere before."""
        command = self._machine.command
        if again and self._machine.leads and "--resume" not in command:
            command = [*command, "--resume"]
        self._environment.setdefault("STREAMRL_INFERENCE_HOST", node)
        with self._starting:
            if self._child is None:  # else Ray has lost the connection, and asks again
                if self._stopped:
                    return INTERRUPTED
                self._child = subprocess.Popen(
                    guarded(command, LEARNER_STOP_LIMIT_S),
                    stdin=subprocess.PIPE,
                    env=self._environment,
                    cwd=self._directory,
                    start_new_session=True,  # Ray kills its actor's group; the guard outlives it
                )
        return self._child.wait()

    def run_here(self) -> int:
        """`run` on the node where Ray has made this actor."""
        import ray

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, of a call that it makes itself
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        node = ray.util.get_node_ip_address()
        print(f"{'again on' if again else 'on'} node {node}", flush=True)
        return self.run(node, again)

    def stop(self) -> None:
        """Ask the parts to end."""
        with self._starting:
            self._stopped = True
            if self._child and self._child.stdin:
                self._child.stdin.close()


def resources(request: Request) -> dict[str, float]:
    """What Ray reserves for a machine, in its names and units."""
    wanted = {"CPU": request.cpus, "GPU": request.gpus, "memory": request.memory_gib * GIB}
    return {name: amount for name, amount in wanted.items() if amount}


def up(
    run: RunFile,
    arguments: Sequence[str],
    stop: threading.Event,
    resume: bool = False,
    fresh: bool = False,
) -> int:
    """Start an actor for each machine of a run, on the Ray that is here or at RAY_ADDRESS, and wait
    until all have ended, or for `stop`, which stops them. Returns the exit code.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # it leaves out lines that differ in numbers
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto")
    except ConnectionError as error:
        raise StreamrlError(
            f"no Ray answers; `ray start` it here, or name it in RAY_ADDRESS ({error})"
        ) from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would leave without an end
    try:
        prepare(run, fresh)
        return _run(machines(run, arguments), stop, resume)
    finally:
        ray.shutdown()


def shortage(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, Any]]) -> str:
    """What is wanted and what Ray's nodes have in all, also where others use it."""
    names = list(dict.fromkeys(name for bundle in bundles for name in bundle))
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return (
        f"Ray has no place for the run yet. Wanted: {_listed(bundles, names)}; a node for each. Its"
        f" nodes, free or not: {_listed(alive, names) or 'none'}"
    )


def _listed(nodes: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    return "; ".join(
        ", ".join(_amount(name, node.get(name, 0)) for name in names) for node in nodes
    )


def _amount(name: str, amount: float) -> str:
    return f"{amount / GIB:.1f} GiB" if name == "memory" else f"{amount:g} {name}"


def _run(wanted: Sequence[Machine], stop: threading.Event, resume: bool) -> int:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    for machine in wanted:
        print(f"{machine.name}: a node with {machine.request}", flush=True)
    bundles = [resources(machine.request) for machine in wanted]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        patient_until = time.monotonic() + PATIENCE_S
        while not group.wait(POLL_S):
            if stop.is_set():
                return INTERRUPTED
            if time.monotonic() >= patient_until:
                patient_until = math.inf
                print(shortage(bundles, ray.nodes()), flush=True)
        actors: dict[str, Any] = {}
        for number, (machine, bundle) in enumerate(zip(wanted, bundles, strict=True)):
            if machine.leads and resume:
                machine = machine._replace(command=[*machine.command, "--resume"])
            options = ray.remote(MachineActor).options(
                num_cpus=bundle.get("CPU"),
                num_gpus=bundle.get("GPU"),
                memory=bundle.get("memory"),
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            )
            actors[machine.name] = options.remote(machine, dict(os.environ), os.getcwd())
        return follow(actors, stop)
    finally:
        remove_placement_group(group)


def follow(actors: Mapping[str, Any], stop: threading.Event) -> int:
    """Wait until the parts of all actors have ended, and end them all with the first one, which
    leads, or when one has ended without seeing the end of the run. Returns the exit code of the one
    that ended it.
    """
    import ray

    lead = next(iter(actors))
    running = {actor.run_here.remote(): name for name, actor in actors.items()}
    ended: int | None = None
    while running:
        done, _ = ray.wait(list(running), timeout=POLL_S)
        for call in done:
            name = running.pop(call)
            code = _code(call)
            print(f"{name}: exit code {code}", flush=True)
            if ended is None and (name == lead or code not in RUN_OVER):
                ended = code
        if running and (ended is not None or stop.is_set()):
            _ask_to_end([actors[name] for name in running.values()])
    return INTERRUPTED if stop.is_set() else ended or 0


def _ask_to_end(actors: Sequence[Any]) -> None:
    """Have actors end their parts, and end those that have no node. It is repeated until none is
    left: an actor may be made again meanwhile.
    """
    import ray

    asked = {actor.stop.remote(): actor for actor in actors}
    _, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
    for call in silent:
        ray.kill(asked[call])


def _code(call: Any) -> int:
    """The exit code that a call of an actor returned; 1 if the actor was ended instead."""
    import ray
    from ray.exceptions import RayActorError

    try:
        return ray.get(call)
    except RayActorError:
        return 1
