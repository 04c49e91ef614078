"""The pods of a run on Kubernetes, as manifests that follow from the run file. What is for an
administrator to decide, and what all parts share, is in deploy/kubernetes.

A part without numbered peers is a Deployment, whose pod Kubernetes makes again elsewhere while its
node is silent: Kafka fences the one that may still run there. Numbered parts and the processes of a
learner are a StatefulSet, which waits until the lost node is deleted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import PREFIX
from streamrl.config.sections.envs import ServerEnv
from streamrl.config.topology import ENV, INFERENCE, LEARNER, ORCHESTRATOR, SERVERS, Part, Role
from streamrl.envs.sessions.settings import Gateway
from streamrl.run.monitoring.verdict import TIME_OVER
from streamrl.run.orchestrator.plan import BROKER_GONE, LEARNER_STOP_LIMIT_S
from streamrl.run.orchestrator.requests import Request, part_request
from streamrl.stream.log.kafka import acls
from streamrl.system.errors import AccessDenied, ConfigError, TopicMissing

Manifest = dict[str, Any]
RUN_FILE = "/etc/streamrl/run.yaml"
RUNS = "/var/lib/streamrl/runs"
STOP_LIMIT_S = 60
NODE_LOST_S = 60  # a node that is silent for so long, after it was noticed, has lost its pods
COORDINATOR_PORT = 8476  # of the first process of a learner that has several
GATEWAY = "gateway"  # the role that agents call, by a Service of its name
PARTS = "parts"  # the Service that names pods
INDEX = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
ADDRESS = {"fieldRef": {"fieldPath": "status.podIP"}}
PROMETHEUS = "http://prometheus.monitoring.svc:9090"
MISSING_TOKENS = (
    'sum(avg_over_time(streamrl_batcher_missing_tokens{{run="{run}",part="batcher",'
    'environment=~"{env}|rest"}}[1m]))'
)
IN_FLIGHT = (
    'sum(avg_over_time(streamrl_inference_in_flight{{run="{run}",part=~"inference-[0-9]+"}}[2m]))'
)
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
    ConfigError if `placement` gives different amounts to pods that are alike.
    """
    found = [_service(run, PARTS, {"clusterIP": "None", "publishNotReadyAddresses": True})]
    for workload in workloads(run):
        found += _workload(run, workload)
    return [*found, _orchestrator(run), _claim(run, "results", "5Gi", "ReadWriteOnce")]


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
    is_scaled = workload.name == INFERENCE.name or (
        workload.role is ENV and not _is_env_server(run, workload)
    )
    # Applying a manifest must not undo what has been scaled.
    spec: Manifest = {} if is_scaled else {"replicas": len(workload.parts)}
    if workload.is_numbered:
        spec |= {"serviceName": PARTS, "podManagementPolicy": "Parallel"}
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
    if is_scaled:
        found.append(_scaled_object(run, workload))
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
    request = _request(run, workload)
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
        "env": _variables(run, workload),
        "resources": _resources(request, room),
    }
    if role.devices == "vllm":
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    return {
        "terminationGracePeriodSeconds": stop_s,
        "tolerations": _tolerations(request.gpus),
        "containers": [container],
        "volumes": volumes,
    }


def _request(run: RunFile, workload: Workload) -> Request:
    requests = {part.name: part_request(run, part) for part in workload.parts}
    if len(set(requests.values())) > 1:
        raise ConfigError(
            "placement: on Kubernetes the pods of a role are alike, but it gives "
            + ", ".join(f"{name} {request}" for name, request in requests.items())
        )
    return requests[workload.parts[0].name]


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


def _variables(run: RunFile, workload: Workload) -> list[Manifest]:
    """What the run file refers to, for those who need it."""
    role = workload.role
    first = workload.parts[0]
    found: list[Manifest] = []
    if workload.is_numbered:
        found.append({"name": "POD_INDEX", "valueFrom": INDEX})
    if topology.is_server(first) and _is_reference(run.inference.host):
        found.append({"name": _variable(run.inference.host), "valueFrom": ADDRESS})
    if role is LEARNER:
        # A version on its way to the store is larger than /tmp.
        found.append({"name": "TMPDIR", "value": RUNS})
    user = f"{role.name}-{first.env}" if role.is_per_env else role.name
    found += _kafka_variables(run, user)
    if _is_env_server(run, workload):
        env = run.envs[first.env]
        assert isinstance(env, ServerEnv)
        url = f"http://{GATEWAY}:{run.settings_of(Gateway).port}"
        found.append({"name": "STREAMRL_GATEWAY_URL", "value": url})
        found += _secret(env.api_key, f"streamrl-{GATEWAY}-{first.env}", "key")
    elif topology.is_server(first) or SERVERS in role.consumes:
        found += _secret(run.inference.api_key, "streamrl-inference", "key")
    if role.name == GATEWAY:
        found += _secret(run.settings_of(Gateway).signing_secret, f"streamrl-{GATEWAY}", "secret")
    return found


def _kafka_variables(run: RunFile, role: str) -> list[Manifest]:
    """The user of a role, and its password, which Strimzi puts into a Secret of its name."""
    user = acls.user_name(run, role)
    name = str(run.kafka.get("sasl.username", ""))
    found = [{"name": _variable(name), "value": user}] if _is_reference(name) else []
    return found + _secret(str(run.kafka.get("sasl.password", "")), user, "password")


def _secret(reference: str, secret: str, key: str) -> list[Manifest]:
    """The variable that a setting refers to, with the value of a Secret's key; none where it does
    not refer to one.
    """
    if not _is_reference(reference):
        return []
    source = {"secretKeyRef": {"name": secret, "key": key}}
    return [{"name": _variable(reference), "valueFrom": source}]


def _is_reference(setting: str) -> bool:
    return setting.startswith(PREFIX)


def _variable(reference: str) -> str:
    return reference.removeprefix(PREFIX)


def _resources(request: Request, room: Room) -> Manifest:
    own = f"{request.memory_gib * 1024:.0f}Mi" if request.memory_gib else ""
    gpus = {"nvidia.com/gpu": request.gpus} if request.gpus else {}
    return {
        "requests": {
            "cpu": f"{request.cpus:g}",
            "memory": own or room.memory,
            "ephemeral-storage": room.disk,
            **gpus,
        },
        "limits": {
            "memory": own or room.most_memory,
            "ephemeral-storage": room.most_disk,
            **gpus,
        },
    }


def _scaled_object(run: RunFile, workload: Workload) -> Manifest:
    """Envs are scaled by demand: a replica for so many tokens that the next batch is short of. The
    most is `envs.<name>.replicas`, by which they share the problems. There is always one, which
    has to be there to read of demand.

    Servers are scaled by load: one more when those there have three quarters of
    `inference.max_num_seqs` in flight. It is for an overlay to set the most. A server takes minutes
    to start, and one that goes leaves requests to be asked again.
    """
    replicas = len(workload.parts)
    if env := workload.parts[0].env:
        query = MISSING_TOKENS.format(run=run.run, env=env)
        # A whole batch that is missing wants all replicas.
        threshold = max(1, run.batcher.total_token_budget // replicas)
        pace: Manifest = {"pollingInterval": 15, "cooldownPeriod": 120}
        least = 1
    else:
        query = IN_FLIGHT.format(run=run.run)
        threshold = max(1, run.inference.max_num_seqs * 3 // 4)
        down = {
            "stabilizationWindowSeconds": 600,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}],
        }
        behavior = {"behavior": {"scaleDown": down}}
        pace = {
            "pollingInterval": 30,
            "cooldownPeriod": 600,
            "advanced": {"horizontalPodAutoscalerConfig": behavior},
        }
        least = replicas
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {"serverAddress": PROMETHEUS, "query": query, "threshold": str(threshold)},
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": workload.name, "labels": _of_run(run)},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "name": workload.name,
            },
            "minReplicaCount": least,
            "maxReplicaCount": replicas,
            **pace,
            "triggers": [trigger],
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
        "env": _kafka_variables(run, name),
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
