import json
import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.config.run_file import RunFile, parse
from streamrl.run.engines import kubernetes
from streamrl.run.orchestrator.plan import INTERRUPTED
from streamrl.system.errors import ConfigError, StreamrlError

SETTINGS: dict[str, Any] = {
    "run": "r",
    "envs": {"copy-digits": {}},
    "kafka": {"bootstrap.servers": "kafka:9093"},
    "inference": {"host": "env:POD_IP", "port": 8000, "api_key": "env:KEY"},
    "weights": {"store": "s3://bucket"},
}
# A kubectl that notes what it is asked for, and answers with the files that are next to it. `fails`
# has a verb that is refused, and how often.
KUBECTL = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
words = [word for word in sys.argv[1:] if not word.startswith("--namespace")]
with (here / "asked").open("a") as asked:
    asked.write(" ".join(sys.argv[1:]) + "\\n")
if words[0] == "kustomize":
    print((here / "rendered.yaml").read_text())
elif words[:2] == ["get", "deployments,statefulsets"]:
    print("deployment/learner" if (here / "applied.yaml").exists() else "")
elif words[0] == "get":
    print((here / f"{{words[1]}}.json").read_text())
elif words[0] == "logs":
    print("the last line")
elif words[0] == "apply":
    (here / "applied.yaml").write_text(sys.stdin.read())
verb, times = (here / "fails").read_text().split()
if words[0] == verb and int(times):
    (here / "fails").write_text(f"{{verb}} {{int(times) - 1}}")
    sys.exit("refused")
"""


class Cluster:
    """What the stand-in for kubectl answers and notes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        program = directory / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable))
        program.chmod(0o755)
        job = {"name": "orchestrator", "namespace": "ns"}
        (directory / "rendered.yaml").write_text(yaml.safe_dump({"kind": "Job", "metadata": job}))
        self.refuses("nothing")
        self.has("pods")
        self.has("jobs")
        self.has("deployments")

    def refuses(self, verb: str, times: int = 1) -> None:
        (self.directory / "fails").write_text(f"{verb} {times}")

    def has_run(self, **settings: Any) -> None:
        """A run with these settings was applied before."""
        volume = {"name": "run-file", "configMap": {"name": "run-7h4k"}}
        spec = {"template": {"spec": {"volumes": [{"name": "tmp"}, volume]}}}
        self.has("deployments", {"metadata": {"name": "learner"}, "spec": spec})
        data = {"run.yaml": yaml.safe_dump({**SETTINGS, **settings})}
        (self.directory / "configmap.json").write_text(json.dumps({"data": data}))
        (self.directory / "applied.yaml").write_text("")

    def has(self, kind: str, *items: dict[str, Any]) -> None:
        (self.directory / f"{kind}.json").write_text(json.dumps({"items": items}))

    def has_ended(self, how: str) -> None:
        ends = {"orchestrator": how, "finish": "Complete"}
        self.has("jobs", *(job(name, end) for name, end in ends.items()))

    def asked(self) -> list[str]:
        return (self.directory / "asked").read_text().splitlines()

    def changes(self) -> list[str]:
        """The verbs of the commands that have changed something."""
        verbs = [line.removeprefix("--namespace=ns ").split()[0] for line in self.asked()]
        return [verb for verb in verbs if verb not in ("kustomize", "get", "logs")]


def job(name: str, end: str) -> dict[str, Any]:
    conditions = [{"type": end, "status": "True"}] if end else []
    return {"metadata": {"name": name}, "status": {"conditions": conditions}}


def pod(name: str, phase: str, node: str = "", **more: str) -> dict[str, Any]:
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": name, **more}, "spec": spec, "status": {"phase": phase}}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{found.directory}:{os.environ['PATH']}")
    monkeypatch.setattr(kubernetes, "POLL_S", 0.01)
    return found


@pytest.fixture
def run() -> RunFile:
    return parse(SETTINGS)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "kustomization.yaml").write_text("")
    return str(tmp_path / "run.yaml")


def start(cluster: Cluster, run: RunFile, file: str, **options: Any) -> int:
    return kubernetes.up(run, [file], threading.Event(), **options)


@pytest.mark.parametrize(("how", "code"), [("Complete", 0), ("Failed", 1)])
def test_a_run_is_applied_and_followed_until_its_pods_have_ended(
    cluster: Cluster,
    run: RunFile,
    file: str,
    how: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def applied(found: kubernetes.Cluster, stop: threading.Event, earlier: Collection[str]) -> int:
        cluster.has("pods", pod("learner-x", "Running", "node1"), pod("buffer-y", "Pending"))
        cluster.has_ended(how)
        return follow(found, stop, earlier)

    follow = kubernetes.follow
    monkeypatch.setattr(kubernetes, "follow", applied)
    assert start(cluster, run, file) == code
    for name, text in kubernetes.files(run).items():
        assert Path(file).with_name(name).read_text() == text
    applied_text = (cluster.directory / "applied.yaml").read_text()
    assert "orchestrator" in applied_text
    shown = capsys.readouterr().out
    assert "learner-x: Running node1\n" in shown and "buffer-y: Pending\n" in shown
    assert all("scale" not in line for line in cluster.asked()), "the Job `finish` ends the pods"


END = ["scale", "delete"]


def test_the_api_server_merges_manifests(cluster: Cluster, run: RunFile, file: str):
    """Else kubectl writes each into an annotation, of 256 KiB at most."""
    cluster.has_ended("Complete")
    assert start(cluster, run, file) == 0
    assert "--namespace=ns apply --server-side --force-conflicts --filename=-" in cluster.asked()


def test_ctrl_c_ends_the_pods_before_the_jobs_which_would_end_them(
    cluster: Cluster, run: RunFile, file: str
):
    stop = threading.Event()
    stop.set()
    assert kubernetes.up(run, [file], stop) == INTERRUPTED
    assert cluster.changes() == ["apply", *END]
    scaled, deleted = cluster.asked()[-2:]
    assert scaled.startswith("--namespace=ns scale deployments,statefulsets")
    assert deleted.startswith("--namespace=ns delete jobs orchestrator finish")


def test_ctrl_c_ends_the_run_also_when_the_api_server_was_away(
    cluster: Cluster, run: RunFile, file: str, capsys: pytest.CaptureFixture[str]
):
    stop = threading.Event()
    stop.set()
    cluster.refuses("scale", 2)
    assert kubernetes.up(run, [file], stop) == INTERRUPTED
    # Without the Jobs nothing would end pods that are there.
    assert cluster.changes() == ["apply", "scale", "scale", *END]
    assert capsys.readouterr().out.count("which is tried again: kubectl: refused") == 1


def test_what_was_applied_of_a_run_is_ended_if_the_rest_is_refused(
    cluster: Cluster, run: RunFile, file: str
):
    cluster.refuses("apply")
    with pytest.raises(StreamrlError, match="kubectl: refused"):
        start(cluster, run, file)
    assert cluster.changes() == ["apply", *END]


def test_the_end_of_what_was_applied_is_not_tried_for_ever(
    cluster: Cluster, run: RunFile, monkeypatch: pytest.MonkeyPatch
):
    cluster.refuses("scale", 1_000)
    (cluster.directory / "applied.yaml").write_text("")
    kubernetes.end_run(kubernetes.Cluster("ns"), limit_s=0.0)
    assert cluster.changes() == ["scale"]


def test_a_run_that_is_there_is_continued_only_when_asked_to(
    cluster: Cluster, run: RunFile, file: str
):
    cluster.has_run()
    with pytest.raises(ConfigError, match="namespace ns has a run; continue it with --resume"):
        start(cluster, run, file)
    assert cluster.changes() == []
    cluster.has_ended("Complete")
    assert start(cluster, run, file, resume=True) == 0
    assert cluster.changes() == ["delete", "apply"]


@pytest.mark.parametrize("resume", [True, False])
def test_another_run_in_the_namespace_is_left_alone(
    cluster: Cluster, run: RunFile, file: str, resume: bool
):
    cluster.has_run(run="other")
    with pytest.raises(ConfigError, match="namespace ns has run 'other', and the run file is that"):
        start(cluster, run, file, resume=resume)
    assert cluster.changes() == []


def test_a_setting_that_cannot_change_is_refused_before_anything_is_ended(
    cluster: Cluster, run: RunFile, file: str
):
    cluster.has_run(buffer={"shards": 2}, topics={"partitions": 2})
    with pytest.raises(ConfigError, match=r"buffer\.shards cannot be changed"):
        start(cluster, run, file, resume=True)
    assert cluster.changes() == []


def test_a_run_that_is_not_there_cannot_be_continued(cluster: Cluster, run: RunFile, file: str):
    with pytest.raises(ConfigError, match="namespace ns has no run to continue"):
        start(cluster, run, file, resume=True)
    assert cluster.changes() == []


def ended(pod: dict[str, Any], code: int, container: str = "a") -> dict[str, Any]:
    """The pod whose part has ended with this exit code and was started again."""
    end = {"exitCode": code, "containerID": container}
    part = {"name": "part", "restartCount": 1, "lastState": {"terminated": end}}
    return {**pod, "status": {**pod["status"], "containerStatuses": [part]}}


def test_a_part_that_has_ended_for_good_ends_the_run(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
):
    cluster.has("pods", ended(pod("learner-x", "Running", "node1"), 7))
    problem = (
        "^learner-x ended with exit code 7: its model cannot be loaded, and a restart does not"
        r" change that\. Last line: the last line$"
    )
    with pytest.raises(StreamrlError, match=problem):
        kubernetes.follow(kubernetes.Cluster("ns"), threading.Event())
    assert "--namespace=ns logs learner-x --container=part --tail=1 --previous" in cluster.asked()
    assert cluster.changes() == ["delete"]  # no workloads are left to be scaled
    assert "learner-x: Running node1, restarts: 1, exit code 7\n" in capsys.readouterr().out


def orchestrator(name: str, created: str, code: int) -> dict[str, Any]:
    made = pod(name, "Failed", creationTimestamp=f"2026-11-28T{created}Z")
    made["metadata"]["labels"] = {"batch.kubernetes.io/job-name": "orchestrator"}
    return ended(made, code)


def test_a_failed_run_has_the_last_exit_code_of_its_orchestrator(cluster: Cluster):
    """It is 16 if the time of the run is over."""
    cluster.has(
        "pods",
        ended(pod("learner-x", "Failed", "node1"), 9),
        orchestrator("orchestrator-a", "10:00:00", 1),
        orchestrator("orchestrator-b", "10:05:00", 16),
    )
    cluster.has_ended("Failed")
    assert kubernetes.follow(kubernetes.Cluster("ns"), threading.Event()) == 16


def test_an_end_before_the_run_was_continued_is_not_one_of_it(
    cluster: Cluster, run: RunFile, file: str
):
    cluster.has_run()
    cluster.has("pods", ended(pod("learner-x", "Running", "node1"), 7))
    cluster.has_ended("Complete")
    assert start(cluster, run, file, resume=True) == 0


def test_a_part_that_failed_while_its_run_ended_changes_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """The Job `finish` is ending the pods."""
    cluster.has("pods", ended(pod("learner-x", "Running", "node1"), 7))
    looks = [{"orchestrator": "Complete", "finish": ""}]
    over = dict.fromkeys(kubernetes.JOBS, "Complete")
    found = kubernetes.Cluster("ns")
    monkeypatch.setattr(found, "jobs", lambda: looks.pop() if looks else over)
    assert kubernetes.follow(found, threading.Event()) == 0
    assert cluster.changes() == []


def test_a_pod_is_shown_when_its_state_has_changed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The number of nodes in the scheduler's message is no change."""
    looks = [
        [unscheduled("0/3 nodes are available")],
        [unscheduled("0/4 nodes are available")],
        [pod("learner-x", "Running", "node1")],
        [pod("learner-x", "Running", "node1")],
    ]
    found = kubernetes.Cluster("ns")
    monkeypatch.setattr(found, "pods", lambda: looks.pop(0) if looks else [])
    monkeypatch.setattr(
        found, "jobs", lambda: {} if looks else dict.fromkeys(kubernetes.JOBS, "Complete")
    )
    assert kubernetes.follow(found, threading.Event()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "learner-x: Pending, Unschedulable (0/3 nodes are available)",
        "learner-x: Running node1",
    ]


def unscheduled(message: str) -> dict[str, Any]:
    found = pod("learner-x", "Pending")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    found["status"]["conditions"] = [{**condition, "message": message}]
    return found


def test_a_run_file_without_a_kustomization_is_refused(
    cluster: Cluster, run: RunFile, tmp_path: Path
):
    with pytest.raises(ConfigError, match=r"no kustomization\.yaml: put the run file into a copy"):
        start(cluster, run, str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(("arguments", "fresh"), [(["--set=a=b"], False), ([], True)])
def test_what_pods_would_not_see_is_refused(
    cluster: Cluster, run: RunFile, file: str, arguments: list[str], fresh: bool
):
    with pytest.raises(ConfigError, match="instead of --set and --fresh"):
        kubernetes.up(run, [file, *arguments], threading.Event(), fresh=fresh)


def test_a_kustomization_without_a_namespace_is_refused(cluster: Cluster, run: RunFile, file: str):
    job = {"kind": "Job", "metadata": {"name": "orchestrator"}}
    (cluster.directory / "rendered.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(ConfigError, match="names no `namespace`"):
        start(cluster, run, file)


def test_what_kubectl_complains_of_is_the_error(cluster: Cluster, run: RunFile, file: str):
    cluster.has_run()
    cluster.refuses("delete")
    with pytest.raises(StreamrlError, match="kubectl: refused"):
        start(cluster, run, file, resume=True)


def test_without_kubectl_there_is_an_error(
    run: RunFile, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StreamrlError, match="kubectl is not installed here"):
        kubernetes.up(run, [file], threading.Event())


def test_the_command_prints_manifests(tmp_path: Path):
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(SETTINGS))
    done = CliRunner().invoke(cli, ["render", str(file), "--on", "kubernetes"])
    assert done.exit_code == 0, done.output
    names = [manifest["metadata"]["name"] for manifest in yaml.safe_load_all(done.output)]
    assert {"learner", "inference", "buffer", "batcher", "env-copy-digits"} <= {*names}


def test_users_have_the_rights_on_topics_of_guests_whose_run_files_are_there(
    cluster: Cluster, file: str
):
    guest = {"second": {"api_key": "env:SECOND_KEY"}}
    serving = {"inference": {**SETTINGS["inference"], "also_serves": guest}}
    run = parse({**SETTINGS, **serving, "learner": {"lora": {"rank": 4}}})
    stop = threading.Event()
    stop.set()
    with pytest.raises(ConfigError, match=r"second\.yaml: cannot be read"):
        kubernetes.up(run, [file], stop)
    served = {"run": "second", "inference": {"replicas": 0, "served_by": ["r"]}}
    Path(file).with_name("second.yaml").write_text(yaml.safe_dump({**SETTINGS, **served}))
    kubernetes.up(run, [file], stop)
    users = yaml.safe_load_all(Path(file).with_name("users.yaml").read_text())
    (server,) = (user for user in users if user["metadata"]["name"] == "r.inference")
    topics = {acl["resource"]["name"] for acl in server["spec"]["authorization"]["acls"]}
    assert "second.servers" in topics
