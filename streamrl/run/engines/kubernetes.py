"""What of a run differs from env to env on Kubernetes, as manifests: a StatefulSet for each, what
scales it and what protects it. deploy/kubernetes has the rest, and adds what all parts share.
"""

from __future__ import annotations

from typing import Any

import yaml

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Part
from streamrl.run.orchestrator.requests import part_request

Manifest = dict[str, Any]
RUN_FILE = "/etc/streamrl/run.yaml"
INDEX = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
MISSING_TOKENS = (
    'sum(avg_over_time(streamrl_batcher_missing_tokens{{run="{run}",part="batcher",'
    'environment=~"{env}|rest"}}[1m]))'
)


def render(run: RunFile) -> str:
    """The envs of a run as a file of a kustomization (deploy/kubernetes)."""
    return yaml.safe_dump_all(env_manifests(run), sort_keys=False, width=1000)


def env_manifests(run: RunFile) -> list[Manifest]:
    """The manifests of the envs whose processes sample themselves. Agents of the others call the
    gateway.
    """
    first = {part.env: part for part in reversed(topology.ENV.parts(run))}
    return [
        manifest
        for env in run.envs
        if env in first and env not in run.session_envs
        for manifest in (
            _stateful_set(run, first[env]),
            _scaled_object(run, env),
            _disruption_budget(run, env),
        )
    ]


def _stateful_set(run: RunFile, part: Part) -> Manifest:
    """A pod is a replica: pod i takes every n-th problem from i on, of the env's n replicas."""
    name = f"env-{part.env}"
    user = f"{run.run}.{name}"
    request = part_request(run, part)
    memory = f"{request.memory_gib * 1024:.0f}Mi" if request.memory_gib else ""
    variables = [
        {"name": "POD_INDEX", "valueFrom": INDEX},
        {"name": "STREAMRL_KAFKA_USER", "value": user},
        _secret("STREAMRL_KAFKA_PASSWORD", user, "password"),
    ]
    if key := run.inference.api_key.removeprefix("env:"):
        variables.append(_secret(key, "streamrl-inference", "key"))
    container = {
        "name": "part",
        "image": "streamrl/core",
        "command": ["streamrl", part.role, RUN_FILE, part.env, "--index", "$(POD_INDEX)"],
        "env": variables,
        "resources": {
            "requests": {
                "cpu": f"{request.cpus:g}",
                "memory": memory or "512Mi",
                "ephemeral-storage": "1Gi",
            },
            "limits": {"memory": memory or "2Gi", "ephemeral-storage": "4Gi"},
        },
    }
    labels = {"streamrl/role": part.role, "streamrl/env": part.env}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "serviceName": "parts",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(run, part.env)},
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": {
                    "containers": [container],
                    "volumes": [{"name": "runs", "emptyDir": {"sizeLimit": "1Gi"}}],
                },
            },
        },
    }


def _scaled_object(run: RunFile, env: str) -> Manifest:
    """Envs are scaled by demand: a replica for so many tokens that the next batch is short of. The
    most is `envs.<name>.replicas`, by which they share the problems. There is always one, which
    has to be there to read of demand.
    """
    name = f"env-{env}"
    query = MISSING_TOKENS.format(run=run.run, env=env)
    replicas = run.envs[env].replicas
    # A whole batch that is missing wants all replicas.
    threshold = max(1, run.batcher.total_token_budget // replicas)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name, "labels": {"streamrl/run": run.run}},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
            "minReplicaCount": 1,
            "maxReplicaCount": replicas,
            "pollingInterval": 15,
            "cooldownPeriod": 120,
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": "http://prometheus.monitoring.svc:9090",
                        "query": query,
                        "threshold": str(threshold),
                    },
                }
            ],
        },
    }


def _disruption_budget(run: RunFile, env: str) -> Manifest:
    """A drain of nodes takes one replica of an env at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"env-{env}"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels(run, env)}},
    }


def _labels(run: RunFile, env: str) -> dict[str, str]:
    """The labels by which the pods of an env are selected."""
    return {"streamrl/role": topology.ENV.name, "streamrl/env": env, "streamrl/run": run.run}


def _secret(variable: str, secret: str, key: str) -> Manifest:
    """A variable that has the value of a Secret's key."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
