"""The pods of a run on Kubernetes, as manifests that follow from the run file. What is for an
administrator to decide, and what all parts share, is in deploy/kubernetes.

A part without numbered peers is a Deployment, whose pod Kubernetes makes again elsewhere while its
node is silent: Kafka fences the one that may still run there. Numbered parts and the processes of a
learner are a StatefulSet, which waits until the lost node is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.config import topology
from streamrl.config.addresses import are_loopback
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import is_reference
from streamrl.config.sections.envs import ServerEnv
from streamrl.config.topology import INFERENCE, LEARNER, ORCHESTRATOR, Part, Role
from streamrl.envs.sessions.settings import Gateway
from streamrl.run.engines.pod_variables import GATEWAY, RUNS, variables
from streamrl.run.monitoring.verdict import TIME_OVER
from streamrl.run.orchestrator.placement import memory_variables
from streamrl.run.orchestrator.plan import BROKER_GONE, LEARNER_STOP_LIMIT_S
from streamrl.run.orchestrator.requests import Request, part_request
from streamrl.system.errors import AccessDenied, ConfigError, TopicMissing

Manifest = dict[str, Any]
RUN_FILE = "/etc/streamrl/run.yaml"
STOP_LIMIT_S = 60
NODE_LOST_S = 60  # a node that is silent for so long, after it was noticed, has lost its pods
COORDINATOR_PORT = 8476  # of the first process of a learner that has several
PARTS = "parts"  # the Service that names pods
HERE = Path("/var/lib/streamrl")  # the working directory of the images
WEIGHTS = "/var/lib/streamrl/weights"  # where overlays mount a volume for weights
# Ports that the network policies of deploy/kubernetes let through.
SERVER_PORTS = range(8000, 8100)
GATEWAY_PORT = 8700
# The longest label of a pod. The pods of a StatefulSet have a label of its name and 11 characters.
LABEL_CHARS = 63
STATEFUL_SET_CHARS = 52
# Exit codes of an orchestrator that would end alike at its next start, as its settings do not work,
# the broker refuses it or the run's time is over; and of one whose broker is away
# (docs/operations.md).
FINAL = (ConfigError.exit_code, AccessDenied.exit_code, TIME_OVER)
BROKER_AWAY = sorted((*BROKER_GONE, TopicMissing.exit_code))


class Room(NamedTuple):
    """What is usual for a container where `placement` gives no memory, and its disk."""

    memory: str
    most_memory: str
    disk: str
    most_disk: str
    runs: str


ROOMS = {
    "": Room("1Gi", "4Gi", "1Gi", "4Gi", "1Gi"),
    "jax": Room("4Gi", "8Gi", "10Gi", "20Gi", "12Gi"),
    "vllm": Room("6Gi", "10Gi", "10Gi", "20Gi", "12Gi"),
}
IMAGES = {"": "streamrl/core", "jax": "streamrl/learner", "vllm": "streamrl/inference"}


class Workload(NamedTuple):
    """Parts whose pods differ in their number only."""

    name: str
    role: Role
    parts: list[Part]

    @property
    def is_numbered(self) -> bool:
        return "--index" in self.parts[0].options


def manifests(run: RunFile) -> list[Manifest]:
    """The manifests of a run's parts and of the orchestrator, which watches them. Raises
    ConfigError with all `obstacles`.
    """
    if problems := list(obstacles(run)):
        raise ConfigError("on Kubernetes this run would not work: " + "; ".join(problems))
    found = [_service(run, PARTS, {"clusterIP": "None", "publishNotReadyAddresses": True})]
    for workload in workloads(run):
        found += _workload(run, workload)
    return [*found, _orchestrator(run), _claim(run, "results", "5Gi", "ReadWriteOnce")]


def obstacles(run: RunFile) -> Iterator[str]:
    """Why the pods of a run could not start, or not reach each other, each with what to write."""
    yield from _unreachable(run)
    yield from _not_shared(run)
    yield from _unlike(run)
    for workload in workloads(run):
        longest = STATEFUL_SET_CHARS if workload.is_numbered else LABEL_CHARS
        if (excess := len(workload.name) - longest) > 0:
            yield (
                f"{workload.name}: a name of {len(workload.name)} characters is too long for the"
                f" labels of its pods, which take {longest}; shorten it by {excess}"
            )


def _unreachable(run: RunFile) -> Iterator[str]:
    servers = str(run.kafka.get("bootstrap.servers", ""))
    if not servers:
        yield "kafka.bootstrap.servers is not set; write the HOST:PORT of a Kafka that pods reach"
    elif are_loopback(servers):
        yield f"kafka.bootstrap.servers {servers} is reached from its own machine only"
    inference = run.inference
    if count := sum(inference.sizes.values()):
        if not is_reference(inference.host):
            yield f"inference.host {inference.host} is not that of each pod; write env:POD_IP"
        last = inference.port + count - 1
        if inference.port not in SERVER_PORTS or last not in SERVER_PORTS:
            yield (
                f"inference.port {inference.port}: the run's {count} servers have to be on ports"
                f" {SERVER_PORTS[0]} to {SERVER_PORTS[-1]}; write {SERVER_PORTS[0]}"
            )
    if any(part.role == GATEWAY for part in topology.parts(run)):
        gateway = run.settings_of(Gateway)
        if gateway.host not in ("0.0.0.0", "::"):
            yield f"gateway.host {gateway.host} is not that of each pod; write 0.0.0.0"
        if gateway.port != GATEWAY_PORT:
            yield f"gateway.port {gateway.port}: agents reach {GATEWAY_PORT}; write that"
    if not run.metrics.serve:
        yield "metrics.serve: false: Kubernetes asks these pages whether a part lives; leave it out"


def _not_shared(run: RunFile) -> Iterator[str]:
    """What parts of one machine have in common, and pods have not."""
    store = run.weights.store.removeprefix("file://")
    if "://" not in store and not (HERE / store).is_relative_to(WEIGHTS):
        where = f"{store} is no volume of the pods" if store else "is empty"
        yield f"weights.store {where}; write {WEIGHTS}, or the URI of an object store"
    if HERE / run.runs_dir != Path(RUNS):
        yield f"runs_dir {run.runs_dir} is no volume of the pods; leave it out"
    for device, sharing in topology.reserved_memory(run).items():
        if len(sharing) > 1:
            yield (
                f"placement: {' and '.join(sharing)} share device {device}, and pods share none;"
                " give each its own devices, or nodes of different names"
            )


def _unlike(run: RunFile) -> Iterator[str]:
    """Pods of a workload are alike, whatever `placement` gives them by their names."""
    for workload in workloads(run):
        given: dict[str, str] = {}
        for part in workload.parts:
            memory = [f"{name} {share}" for name, share in memory_variables(run, part).items()]
            given[part.name] = ", ".join([str(part_request(run, part)), *memory])
        if len(set(given.values())) > 1:
            yield (
                "placement: the pods of a role are alike, but it gives "
                + ", ".join(f"{name} {amounts}" for name, amounts in given.items())
            )


def workloads(run: RunFile) -> list[Workload]:
    found: dict[str, Workload] = {}
    for part in topology.parts(run):
        name = _name(part)
        found.setdefault(name, Workload(name, topology.role_of(part), [])).parts.append(part)
    return list(found.values())


def _name(part: Part) -> str:
    if part.env:
        return f"{part.role}-{part.env}"
    if part.role == INFERENCE.name and topology.pool_of(part) != topology.GENERATION:
        return f"{part.role}-{topology.pool_of(part)}"
    return part.role if "--index" in part.options else part.name


def _workload(run: RunFile, workload: Workload) -> list[Manifest]:
    first = workload.parts[0]
    spec: Manifest = {"replicas": len(workload.parts)}
    if workload.is_numbered:
        spec |= {"serviceName": PARTS, "podManagementPolicy": "Parallel"}
        if first.processes > 1:
            # They start together: one of another template would wait for the others in vain.
            spec["updateStrategy"] = {"type": "OnDelete"}
    else:
        spec["strategy"] = {"type": "Recreate"}  # a second one would fence the first
    spec["selector"] = {"matchLabels": _selected(run, workload.name)}
    spec["template"] = {
        "metadata": {"labels": _labels(run, workload)},
        "spec": _pod(run, workload),
    }
    found = [
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet" if workload.is_numbered else "Deployment",
            "metadata": {"name": workload.name, "labels": _labels(run, workload)},
            "spec": spec,
        }
    ]
    if workload.is_numbered:
        found.append(_disruption_budget(run, workload))
    if workload.role is LEARNER:
        mode = "ReadWriteMany" if first.processes > 1 else "ReadWriteOnce"
        found.append(_claim(run, LEARNER.name, "20Gi", mode))
    if workload.name == GATEWAY:
        port = run.settings_of(Gateway).port
        ports = [{"name": "http", "port": port, "targetPort": port}]
        selector = _selected(run, workload.name)
        found.append(_service(run, workload.name, {"selector": selector, "ports": ports}))
    return found


def _pod(run: RunFile, workload: Workload) -> Manifest:
    """A pod has the name and the claims of its part; what all parts share is in deploy/."""
    role = workload.role
    room = ROOMS[role.devices]
    request = part_request(run, workload.parts[0])
    runs: Manifest = {"emptyDir": {"sizeLimit": room.runs}}
    stop_s = STOP_LIMIT_S
    if role is LEARNER:
        stop_s = int(LEARNER_STOP_LIMIT_S)
        runs = {"persistentVolumeClaim": {"claimName": LEARNER.name}}
    volumes = [{"name": "runs", **runs}]
    container = {
        "name": "part",
        "image": _image(run, workload),
        "command": _command(run, workload),
        "env": variables(run, workload.parts[0]),
        "resources": _resources(request, room),
    }
    if role.devices == "vllm" or request.gpus > 1:  # NCCL's, too
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    return {
        "terminationGracePeriodSeconds": stop_s,
        "tolerations": _tolerations(request.gpus),
        "containers": [container],
        "volumes": volumes,
    }


def _tolerations(gpus: int) -> list[Manifest]:
    found: list[Manifest] = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": NODE_LOST_S,
        }
        for state in ("not-ready", "unreachable")
    ]
    if gpus:
        found.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    return found


def _image(run: RunFile, workload: Workload) -> str:
    if _is_env_server(run, workload):
        return "streamrl/env-server"
    return IMAGES[workload.role.devices]


def _command(run: RunFile, workload: Workload) -> list[str]:
    first = workload.parts[0]
    options = list(first.options)
    if workload.is_numbered:
        options[options.index("--index") + 1] = "$(POD_INDEX)"
    if first.processes > 1:
        options += ["--coordinator", f"{workload.name}-0.{PARTS}:{COORDINATOR_PORT}"]
    if workload.name == GATEWAY:
        # All replicas have the same port, as each pod has an address of its own.
        options += ["--port", str(run.settings_of(Gateway).port)]
    return ["streamrl", workload.role.name, RUN_FILE, *options]


def _resources(request: Request, room: Room) -> Manifest:
    """What is reserved, and the limits. A part with GPUs has no limit of memory but the one that it
    is given, because what it needs grows with its model.
    """
    own = f"{request.memory_gib * 1024:.0f}Mi" if request.memory_gib else ""
    gpus = {"nvidia.com/gpu": request.gpus} if request.gpus else {}
    most = own or ("" if gpus else room.most_memory)
    return {
        "requests": {
            "cpu": f"{request.cpus:g}",
            "memory": own or room.memory,
            "ephemeral-storage": room.disk,
            **gpus,
        },
        "limits": {
            **({"memory": most} if most else {}),
            "ephemeral-storage": room.most_disk,
            **gpus,
        },
    }


def _disruption_budget(run: RunFile, workload: Workload) -> Manifest:
    """A drain of nodes takes one pod at a time. Parts without peers are back in seconds."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": workload.name, "labels": _of_run(run)},
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": _selected(run, workload.name)},
        },
    }


def _orchestrator(run: RunFile) -> Manifest:
    """A Job that watches the run: the run has an end. Its report, the curve of rewards and its log
    are on the claim `results`, which outlives it.
    """
    name = ORCHESTRATOR.name
    labels = {**_selected(run, name), **_of_run(run), "streamrl/role": name}
    container = {
        "name": "part",
        "image": IMAGES[""],
        "command": ["streamrl", name, RUN_FILE],
        "env": variables(run, Part(name, name, name)),
        "resources": _resources(Request(0.25, 0, 0), ROOMS[""]),
    }
    on_codes = [
        {"action": action, "onExitCodes": {"operator": "In", "values": list(codes)}}
        for action, codes in (("FailJob", FINAL), ("Ignore", BROKER_AWAY))
    ]
    drained = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": 6,
            "podFailurePolicy": {
                "rules": [*on_codes, {"action": "Ignore", "onPodConditions": drained}]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "terminationGracePeriodSeconds": STOP_LIMIT_S,
                    "tolerations": _tolerations(0),
                    "restartPolicy": "Never",
                    "containers": [container],
                    "volumes": [
                        {"name": "runs", "persistentVolumeClaim": {"claimName": "results"}}
                    ],
                },
            },
        },
    }


def _claim(run: RunFile, name: str, size: str, mode: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": _of_run(run)},
        "spec": {"accessModes": [mode], "resources": {"requests": {"storage": size}}},
    }


def _service(run: RunFile, name: str, spec: Manifest) -> Manifest:
    """A Service; by default of all pods of the run."""
    metrics = [{"name": "metrics", "port": 9464, "targetPort": "metrics"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": _of_run(run)},
        "spec": {"selector": _of_run(run), "ports": metrics, **spec},
    }


def _is_env_server(run: RunFile, workload: Workload) -> bool:
    return isinstance(run.envs.get(workload.parts[0].env), ServerEnv)


def _labels(run: RunFile, workload: Workload) -> dict[str, str]:
    """The labels of a workload and its pods. Network policies and overlays go by `streamrl/role`,
    in which a server of a model of its own is a judge, and an env in another Python an agent.
    """
    first = workload.parts[0]
    labels = {**_selected(run, workload.name), **_of_run(run), "streamrl/role": first.role}
    if topology.is_server(first) and run.inference.own_model(topology.pool_of(first)):
        labels["streamrl/role"] = "judge"
    if first.env:
        labels["streamrl/env"] = first.env
    if _is_env_server(run, workload):
        labels |= {"streamrl/role": "env-server", "streamrl/agent": "true"}
    return labels


def _selected(run: RunFile, name: str) -> dict[str, str]:
    """The labels by which the pods of a workload are selected."""
    return {"app.kubernetes.io/name": name, "streamrl/run": run.run}


def _of_run(run: RunFile) -> dict[str, str]:
    """The labels of whatever a run has."""
    return {"app.kubernetes.io/part-of": "streamrl", "streamrl/run": run.run}
