"""A run on Kubernetes: a kustomization with what follows from its run file, applied by kubectl and
followed until the orchestrator's Job has ended. Each part is a pod (`pods.py`), which Kubernetes
starts again, and makes again on another node when its own is lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from streamrl.config.run_file import RunFile, parse
from streamrl.run.engines.commands import output
from streamrl.run.engines.pod_status import FINAL, PART, End, ends, pod_status
from streamrl.run.engines.pods import manifests
from streamrl.run.orchestrator.plan import INTERRUPTED
from streamrl.run.orchestrator.resuming import refusals
from streamrl.stream.log import topics
from streamrl.stream.log.kafka import acls
from streamrl.system.errors import ConfigError, StreamrlError
from streamrl.system.manifests import to_yaml
from streamrl.system.yaml_reader import from_yaml

POLL_S = 5.0
CLEAN_UP_S = 60.0  # for which the end of a run that could not be applied is tried
JOBS = ("orchestrator", "finish")
JOB_LABEL = "batch.kubernetes.io/job-name"  # of the pods of a Job
OURS = "--selector=app.kubernetes.io/part-of=streamrl"
RUN_VOLUME = "run-file"  # of the ConfigMap that pods read their run file from (components/part)


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
    check_namespace(cluster, run, resume)
    earlier = {end.container for pod in cluster.pods() for end in ends(pod)}
    if resume:
        cluster.end_jobs()
    try:
        cluster.apply(rendered)
    except StreamrlError:
        # Pods that were made already would run on, and hold GPUs, with nothing that ends them.
        print("not all of the run could be applied: what there is of it is ended", flush=True)
        end_run(cluster, CLEAN_UP_S)
        raise
    print(f"the run's log: kubectl -n {cluster.namespace} logs -f job/{JOBS[0]}", flush=True)
    return follow(cluster, stop, earlier)


class Cluster:
    """The namespace of a run, by kubectl and its current context."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def ask(self, *arguments: str, text: str | None = None) -> str:
        """What kubectl prints. Raises StreamrlError with what it complains of."""
        return _kubectl(f"--namespace={self.namespace}", *arguments, text=text)

    def apply(self, rendered: str) -> None:
        """Apply manifests. The API server merges them: kubectl would put a copy of each into an
        annotation, which the run file of some hundred envs is too large for.
        """
        self.ask("apply", "--server-side", "--force-conflicts", "--filename=-", text=rendered)

    def run_file(self) -> Any:
        """The run file that the run's pods read, also while there are none. None without a run."""
        for deployment in self._items("deployments", OURS):
            for volume in deployment["spec"]["template"]["spec"].get("volumes", ()):
                if volume["name"] == RUN_VOLUME:
                    name = volume["configMap"]["name"]
                    found = json.loads(self.ask("get", "configmap", name, "--output=json"))
                    return from_yaml(found["data"]["run.yaml"])
        return None

    def pods(self) -> list[dict[str, Any]]:
        """The pods of the run."""
        return self._items("pods", OURS)

    def jobs(self) -> dict[str, str]:
        """How the orchestrator's Job and the one that ends the pods have ended; empty while they
        run.
        """
        ways = ("Complete", "Failed")
        return {
            job["metadata"]["name"]: next(
                (
                    condition["type"]
                    for condition in job["status"].get("conditions", ())
                    if condition["type"] in ways and condition["status"] == "True"
                ),
                "",
            )
            for job in self._items("jobs")
            if job["metadata"]["name"] in JOBS
        }

    def last_line(self, pod: str, end: End) -> str:
        """The last line of the log of a part that has ended; empty if it cannot be read."""
        which = ["--previous"] if end.is_previous else []
        with contextlib.suppress(StreamrlError):
            return self.ask("logs", pod, f"--container={PART}", "--tail=1", *which).strip()
        return ""

    def end_jobs(self) -> None:
        self.ask("delete", "jobs", *JOBS, "--ignore-not-found")

    def end(self) -> None:
        """Do what the Job `finish` does, then delete the Jobs: without them nothing else would end
        the pods.
        """
        kinds = "deployments,statefulsets"
        if self.ask("get", kinds, OURS, "--output=name").strip():
            self.ask("scale", kinds, OURS, "--replicas=0")
        self.end_jobs()

    def _items(self, *what: str) -> list[dict[str, Any]]:
        return json.loads(self.ask("get", *what, "--output=json"))["items"]


def check_namespace(cluster: Cluster, run: RunFile, resume: bool) -> None:
    """Raise ConfigError unless the namespace has the run that is to be continued, with settings
    that can be, or none if the run is a new one.
    """
    namespace = cluster.namespace
    before = cluster.run_file()
    if before is None:
        if resume:
            raise ConfigError(
                f"namespace {namespace} has no run to continue; start it without --resume"
            )
        return
    if before["run"] != run.run:
        raise ConfigError(
            f"namespace {namespace} has run {before['run']!r}, and the run file is that of"
            f" {run.run!r}; give each run its own namespace, in kustomization.yaml"
        )
    if not resume:
        raise ConfigError(f"namespace {namespace} has a run; continue it with --resume")
    where = f"run file in namespace {namespace}"
    if problem := next(refusals(parse(before, where), run), ""):
        raise ConfigError(problem)


def follow(cluster: Cluster, stop: threading.Event, earlier: Collection[str] = ()) -> int:
    """Show the states of the pods until the run has ended and its pods have.

    `earlier`: the containers that had ended before this start of the run. Raises StreamrlError, and
    ends the run, if a part has ended since with an exit code after which another start does not
    help.
    """
    shown: dict[str, str] = {}
    while not stop.wait(POLL_S):
        try:
            pods = cluster.pods()
            jobs = cluster.jobs()
        except StreamrlError as error:
            print(error, flush=True)
            continue
        now = {pod["metadata"]["name"]: pod_status(pod) for pod in pods}
        for name, status in now.items():
            if shown.get(name) != status.summary:
                print(f"{name}: {status}", flush=True)
        shown = {name: status.summary for name, status in now.items()}
        if all(jobs.get(name) for name in JOBS):
            return 0 if jobs[JOBS[0]] == "Complete" else _exit_code(pods)
        for name, end in [] if jobs.get(JOBS[0]) else _failures(pods, earlier):
            line = cluster.last_line(name, end)
            print(f"{name} has failed, and the run is ended", flush=True)
            end_run(cluster)
            raise StreamrlError(
                f"{name} ended with exit code {end.exit_code}: {FINAL[end.exit_code]}. Last line:"
                f" {line}"
            )
    end_run(cluster)
    return INTERRUPTED


def end_run(cluster: Cluster, limit_s: float = math.inf) -> None:
    """End the run's pods and Jobs. It is tried until it is done, or for `limit_s`: the API server
    may be away.
    """
    deadline = time.monotonic() + limit_s
    said = ""
    while True:
        try:
            cluster.end()
            return
        except StreamrlError as error:
            if said != str(error):
                said = str(error)
                print(f"the run cannot be ended yet, which is tried again: {said}", flush=True)
        if time.monotonic() >= deadline:
            return
        time.sleep(POLL_S)


def _exit_code(pods: Sequence[dict[str, Any]]) -> int:
    """The last exit code of the orchestrator, whose Job has failed; 1 if its pods are gone."""
    made = [pod for pod in pods if pod["metadata"].get("labels", {}).get(JOB_LABEL) == JOBS[0]]
    made.sort(key=lambda pod: pod["metadata"]["creationTimestamp"], reverse=True)
    codes = (end.exit_code for pod in made for end in ends(pod) if end.exit_code)
    return next(codes, 1)


def _failures(
    pods: Sequence[dict[str, Any]], earlier: Collection[str]
) -> Iterator[tuple[str, End]]:
    """The pods whose part has ended for good, each with that end."""
    for pod in pods:
        for end in ends(pod):
            if end.exit_code in FINAL and end.container not in earlier:
                yield pod["metadata"]["name"], end


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
    return output(["kubectl", *arguments], text)
