import json
import os
import sys
import threading
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
# A kubectl that notes what it is asked for, and answers with the files that are next to it.
KUBECTL = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
words = [word for word in sys.argv[1:] if not word.startswith("--namespace")]
with (here / "asked").open("a") as asked:
    asked.write(" ".join(sys.argv[1:]) + "\\n")
if words[0] == "kustomize":
    print((here / "rendered.yaml").read_text())
elif words[:2] == ["get", "deployments"]:
    print("deployment/learner" if (here / "applied.yaml").exists() else "")
elif words[0] == "get":
    print((here / f"{{words[1]}}.json").read_text())
elif words[0] == "apply":
    (here / "applied.yaml").write_text(sys.stdin.read())
elif words[0] == (here / "fails").read_text():
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
        (directory / "fails").write_text("nothing")
        self.has("pods")
        self.has("jobs")

    def has(self, kind: str, *items: dict[str, Any]) -> None:
        (self.directory / f"{kind}.json").write_text(json.dumps({"items": items}))

    def has_ended(self, how: str) -> None:
        ends = {"orchestrator": how, "finish": "Complete"}
        self.has("jobs", *(job(name, end) for name, end in ends.items()))

    def asked(self) -> list[str]:
        return (self.directory / "asked").read_text().splitlines()


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
    def applied(found: kubernetes.Cluster, stop: threading.Event) -> int:
        cluster.has("pods", pod("learner-x", "Running", "node1"), pod("buffer-y", "Pending"))
        cluster.has_ended(how)
        return follow(found, stop)

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


def test_ctrl_c_ends_the_pods_and_the_jobs(cluster: Cluster, run: RunFile, file: str):
    stop = threading.Event()
    stop.set()
    assert kubernetes.up(run, [file], stop) == INTERRUPTED
    ended = cluster.asked()[-3:]
    assert ended[0].startswith("--namespace=ns delete jobs orchestrator finish")
    assert "autoscaling.keda.sh/paused-replicas=0" in ended[1]
    assert ended[2].startswith("--namespace=ns scale deployments,statefulsets")


def test_a_run_that_is_there_is_continued_only_when_asked_to(
    cluster: Cluster, run: RunFile, file: str
):
    (cluster.directory / "applied.yaml").write_text("")
    with pytest.raises(ConfigError, match="namespace ns has a run; continue it with --resume"):
        start(cluster, run, file)
    assert not (cluster.directory / "applied.yaml").read_text()
    cluster.has_ended("Complete")
    assert start(cluster, run, file, resume=True) == 0
    asked = [line for line in cluster.asked() if "delete" in line or "annotate" in line]
    assert asked[0].startswith("--namespace=ns delete jobs orchestrator finish")
    assert asked[1].endswith("autoscaling.keda.sh/paused-replicas-")


def test_a_pod_that_is_to_go_is_shown_as_terminating(cluster: Cluster):
    cluster.has("pods", pod("buffer-y", "Running", "node1", deletionTimestamp="2026"))
    assert kubernetes.Cluster("ns").pods() == {"buffer-y": "Terminating node1"}


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
    (cluster.directory / "fails").write_text("delete")
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
