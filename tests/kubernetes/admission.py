"""What a real API server admits of the run files, and where a real scheduler binds the pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.overlays import DEPLOY, make_room, overlay
from tests.support.waiting import until

GPU = "nvidia.com/gpu"
GPUS = 8  # of each of two nodes
CAPACITY = {"cpu": "96", "memory": "1Ti", "ephemeral-storage": "2Ti", GPU: str(GPUS)}
NODES = ("gpu1", "gpu2")


class Case(NamedTuple):
    """A run file, and what it asks of two nodes with eight GPUs each."""

    name: str
    file: Path
    overlay: str
    claims: tuple[str, ...]
    gpus: int


class Admitted(NamedTuple):
    """What became of a run file's manifests."""

    name: str
    objects: int
    pods: int
    gpus: dict[str, int]  # by node
    pending: str  # why one server more is not bound; empty: it is


CASES = (
    Case("small", DEPLOY / "kubernetes/overlays/small/run.yaml", "small", (), 0),
    Case("agents", DEPLOY / "runs/compose-agents.yaml", "small", (), 0),
    Case("gang", DEPLOY / "runs/qwen3-8b-2x8xh100.yaml", "small", (), 16),
    Case(
        "production",
        DEPLOY / "kubernetes/overlays/production/run.yaml",
        "production",
        ("model", "judge"),
        16,
    ),
)


def look(plane: ControlPlane, directory: Path) -> Iterator[Admitted]:
    """Apply each of the run files, see to which nodes its pods go, and delete it again."""
    for node in NODES:
        plane.start_node(node, CAPACITY)
    until(lambda: len(plane.ready_nodes()) == len(NODES), 60, "nodes are not ready", 0.5)
    for case in CASES:
        yield _case(plane, directory, case)
    for node in NODES:
        plane.kill_node(node)
        plane.delete_node(node)


def _case(plane: ControlPlane, directory: Path, case: Case) -> Admitted:
    run = yaml.safe_load(case.file.read_text())
    small = yaml.safe_load((DEPLOY / "kubernetes/overlays/small/run.yaml").read_text())
    if case.overlay == "small":
        # Kafka and the volume of the overlay.
        run |= {"kafka": small["kafka"], "weights": small["weights"]}
    if case.name == "gang":
        # Two processes of four GPUs each, which are one learner.
        run["learner"]["processes"] = 2
    here = overlay(directory / case.name, case.overlay, run, case.name)
    make_room(plane, case.name, "learner", "results", "weights", *case.claims)
    for claim in case.claims:
        spec = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}}
        made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}}
        plane.apply({**made, "spec": spec}, namespace=case.name)
    admitted = plane.kubectl("apply", "--kustomize", str(here)).splitlines()
    pods = until(lambda: _all_bound(plane, case), 60, lambda: _unbound(plane, case), 0.5)
    gpus = Counter[str]()
    for pod in pods:
        gpus[pod["spec"]["nodeName"]] += gpus_of(pod)
    assert sum(gpus.values()) == case.gpus and max(gpus.values()) <= GPUS, gpus
    pending = ""
    if case.gpus:
        more = run["inference"]["replicas"] + 1
        plane.kubectl("-n", case.name, "scale", "statefulset/inference", f"--replicas={more}")
        pending = until(lambda: _unbound(plane, case), 60, "one server more is bound", 0.5)
        assert f"Insufficient {GPU}" in pending, pending
    plane.kubectl("-n", case.name, "delete", "deployments,statefulsets,jobs", "--all")
    plane.kubectl("-n", case.name, "delete", "pods", "--all", "--force", "--grace-period=0")
    return Admitted(case.name, len(admitted), len(pods), dict(sorted(gpus.items())), pending)


def _all_bound(plane: ControlPlane, case: Case) -> list[dict[str, Any]]:
    """The pods, when there are all and each has a node."""
    wanted = sum(
        item["spec"].get("replicas", 1)
        for kind in ("deployments", "statefulsets")
        for item in plane.get(f"/apis/apps/v1/namespaces/{case.name}/{kind}")
    )
    pods = plane.pods(case.name)
    jobs = 2  # the orchestrator's, and the one that ends the run
    bound = [pod for pod in pods if pod["spec"].get("nodeName")]
    return pods if len(bound) == len(pods) == wanted + jobs else []


def _unbound(plane: ControlPlane, case: Case) -> str:
    """Why a pod has no node."""
    for pod in plane.pods(case.name):
        for condition in pod["status"].get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{pod['metadata']['name']}: {condition.get('message', '')}"
    return ""


def gpus_of(pod: dict[str, Any]) -> int:
    return sum(
        int(container["resources"].get("requests", {}).get(GPU, 0))
        for container in pod["spec"]["containers"]
    )
