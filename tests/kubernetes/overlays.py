"""Kustomizations of the proof: copies of those in deploy/ with a run file and a namespace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from streamrl.config import run_file
from streamrl.run.engines.kubernetes import files
from tests.kubernetes.control_plane import ControlPlane

DEPLOY = Path(__file__).parents[2] / "deploy"


def overlay(directory: Path, of: str, run: dict[str, Any], namespace: str) -> Path:
    """A copy of deploy/kubernetes in `directory`, of whose overlay `of` the run file is `run`.
    Returns the directory of the overlay. Its volume for weights can be mounted on every node.
    """
    shutil.copytree(DEPLOY / "kubernetes", directory)
    here = directory / "overlays" / of
    (here / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    for name, text in files(run_file.load(here / "run.yaml")).items():
        (here / name).write_text(text)
    settings = (here / "kustomization.yaml").read_text()
    settings = settings.replace("namespace: streamrl\n", f"namespace: {namespace}\n")
    (here / "kustomization.yaml").write_text(settings)
    if of == "small":
        reading = yaml.safe_load((here / "weights-read.yaml").read_text())
        del reading["spec"]["template"]["spec"]["affinity"]
        (here / "weights-read.yaml").write_text(yaml.safe_dump(reading))
        claim = yaml.safe_load((here / "weights.yaml").read_text())
        claim["spec"]["accessModes"] = ["ReadWriteMany"]
        (here / "weights.yaml").write_text(yaml.safe_dump(claim))
    return here


def make_room(plane: ControlPlane, namespace: str, *claims: str) -> None:
    """A namespace as docs/deploy.md has it, and a volume for each of its claims."""
    enforced = {
        "pod-security.kubernetes.io/enforce": "baseline",
        "pod-security.kubernetes.io/warn": "restricted",
    }
    metadata = {"name": namespace, "labels": enforced}
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    for claim in claims:
        path = volume(plane, namespace, claim)
        path.mkdir(parents=True)
        reference = {"namespace": namespace, "name": claim}
        spec = {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "claimRef": reference,
            "hostPath": {"path": str(path)},
        }
        name = {"name": f"{namespace}-{claim}"}
        plane.apply(
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": name, "spec": spec}
        )


def volume(plane: ControlPlane, namespace: str, claim: str) -> Path:
    return plane.directory / "volumes" / f"{namespace}-{claim}"
