"""A run on Kubernetes: a kustomization with what follows from its run file, applied by kubectl and
followed until the orchestrator's Job has ended. Each part is a pod (`pods.py`), which Kubernetes
starts again, and makes again on another node when its own is lost.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import yaml

from streamrl.config.run_file import RunFile
from streamrl.run.engines.pods import manifests
from streamrl.run.orchestrator.plan import INTERRUPTED
from streamrl.stream.log import topics
from streamrl.stream.log.kafka import acls
from streamrl.system.errors import ConfigError, StreamrlError
from streamrl.system.manifests import to_yaml

POLL_S = 5.0
JOBS = ("orchestrator", "finish")
PAUSED = "autoscaling.keda.sh/paused-replicas"  # KEDA would start pods again
OURS = "--selector=app.kubernetes.io/part-of=streamrl"


def render(run: RunFile) -> str:
    """The pods of a run as a file of a kustomization (deploy/kubernetes)."""
    return to_yaml(manifests(run))


def files(run: RunFile, guests: Sequence[RunFile] = ()) -> dict[str, str]:
    """What follows from a run file, by the names of files in its kustomization. `guests`: the runs
    of inference.also_serves.
    """
    return {
        "topics.yaml": topics.render(run),
        "users.yaml": acls.render(run, guests=guests),
        "parts.yaml": render(run),
    }


def up(
    run: RunFile,
    arguments: Sequence[str],
    stop: threading.Event,
    resume: bool = False,
    fresh: bool = False,
) -> int:
    """Write what follows from a run file into its directory, apply that as a kustomization, and
    follow the run until its end, or until `stop`, which stops it. Returns the exit code. The Job
    `finish` ends the pods, whether or not this process is there.

    `arguments`: the run file. Its settings cannot be changed on the command line, as pods read the
    file. Topics outlive a run, so there is no `fresh`.
    """
    file, *changed = arguments
    if changed or fresh:
        raise ConfigError(
            "on Kubernetes pods read the run file, and topics stay: write settings into it, and"
            " give a new run another name, instead of --set and --fresh"
        )
    directory = Path(file).absolute().parent
    if not (directory / "kustomization.yaml").exists():
        raise ConfigError(
            f"{directory} has no kustomization.yaml: put the run file into a copy of"
            " deploy/kubernetes/overlays/small or production"
        )
    for name, text in files(run, acls.load_guests(run, directory)).items():
        (directory / name).write_text(text)
    rendered = _kubectl("kustomize", str(directory))
    cluster = Cluster(_namespace(rendered))
    if resume:
        cluster.end_jobs()
        cluster.ask("annotate", "scaledobjects.keda.sh", OURS, "--overwrite", f"{PAUSED}-")
    elif cluster.has_run():
        raise ConfigError(f"namespace {cluster.namespace} has a run; continue it with --resume")
    cluster.ask("apply", "--filename=-", text=rendered)
    print(f"the run's log: kubectl -n {cluster.namespace} logs -f job/{JOBS[0]}", flush=True)
    return follow(cluster, stop)


class Cluster:
    """The namespace of a run, by kubectl and its current context."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def ask(self, *arguments: str, text: str | None = None) -> str:
        """What kubectl prints. Raises StreamrlError with what it complains of."""
        return _kubectl(f"--namespace={self.namespace}", *arguments, text=text)

    def has_run(self) -> bool:
        """Whether the namespace has the workloads of a run, with pods or without."""
        return bool(self.ask("get", "deployments", OURS, "--output=name").strip())

    def pods(self) -> dict[str, str]:
        """Phase and node of each pod of the run, by its name."""
        items = json.loads(self.ask("get", "pods", OURS, "--output=json"))["items"]
        return {
            pod["metadata"]["name"]: " ".join(
                [
                    "Terminating"
                    if "deletionTimestamp" in pod["metadata"]
                    else pod["status"]["phase"],
                    pod["spec"].get("nodeName", ""),
                ]
            ).strip()
            for pod in items
        }

    def jobs(self) -> dict[str, str]:
        """How the orchestrator's Job and the one that ends the pods have ended; empty while they
        run.
        """
        items = json.loads(self.ask("get", "jobs", "--output=json"))["items"]
        ends = ("Complete", "Failed")
        return {
            job["metadata"]["name"]: next(
                (
                    condition["type"]
                    for condition in job["status"].get("conditions", ())
                    if condition["type"] in ends and condition["status"] == "True"
                ),
                "",
            )
            for job in items
            if job["metadata"]["name"] in JOBS
        }

    def end_jobs(self) -> None:
        self.ask("delete", "jobs", *JOBS, "--ignore-not-found")

    def end_pods(self) -> None:
        """What the Job `finish` does."""
        self.ask("annotate", "scaledobjects.keda.sh", OURS, "--overwrite", f"{PAUSED}=0")
        self.ask("scale", "deployments,statefulsets", OURS, "--replicas=0")


def follow(cluster: Cluster, stop: threading.Event) -> int:
    """Show the states of the pods until the run has ended and its pods have."""
    states: dict[str, str] = {}
    while not stop.wait(POLL_S):
        try:
            now = cluster.pods()
            jobs = cluster.jobs()
        except StreamrlError as error:
            print(error, flush=True)
            continue
        for name, state in now.items():
            if states.get(name) != state:
                print(f"{name}: {state}", flush=True)
        states = now
        if all(jobs.get(name) for name in JOBS):
            return 0 if jobs[JOBS[0]] == "Complete" else 1
    cluster.end_jobs()
    cluster.end_pods()
    return INTERRUPTED


def _namespace(rendered: str) -> str:
    """The namespace of the orchestrator's Job, among manifests. Raises ConfigError if there is
    none.
    """
    for manifest in yaml.safe_load_all(rendered):
        name = manifest["metadata"]["name"]
        if (manifest["kind"], name) == ("Job", JOBS[0]) and "namespace" in manifest["metadata"]:
            return manifest["metadata"]["namespace"]
    raise ConfigError("kustomization.yaml names no `namespace`, or leaves out parts.yaml")


def _kubectl(*arguments: str, text: str | None = None) -> str:
    try:
        done = subprocess.run(
            ["kubectl", *arguments], input=text, capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise StreamrlError("kubectl is not installed here") from None
    except subprocess.CalledProcessError as error:
        raise StreamrlError(f"kubectl: {error.stderr.strip() or error.returncode}") from None
    return done.stdout
