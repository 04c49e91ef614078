import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import run_file, topology
from streamrl.config.run_file import parse
from streamrl.run.engines import pods
from streamrl.system.errors import ConfigError

RUN_FILES = sorted((Path(__file__).parents[3] / "deploy" / "runs").glob("*.yaml"))

SERVERS = {"host": "env:POD_IP", "api_key": "env:KEY", "port": 8000}
GATEWAY = {"signing_secret": "env:SECRET", "host": "0.0.0.0"}
SETTINGS: dict[str, Any] = {
    "run": "r",
    "envs": {
        "copy-digits": {"replicas": 3, "fraction": 0.5},
        "outside": {"kind": "add-digits", "replicas": 0},
        "agents": {"sessions": {"rewards": ["reward"]}, "fraction": 0.1},
        "served": {
            "kind": "verifiers:gsm8k",
            "python": "/opt/python",
            "fraction": 0.1,
            "api_key": "env:GATEWAY_KEY",
        },
    },
    "kafka": {
        "bootstrap.servers": "kafka:9093",
        "sasl.username": "env:KAFKA_USER",
        "sasl.password": "env:KAFKA_PASSWORD",
    },
    "inference": {**SERVERS, "pools": {"judge": {"model": "/m"}}},
    "gateway": GATEWAY,
    "weights": {"store": "s3://bucket"},
}
PLAIN: dict[str, Any] = {
    "run": "r",
    "envs": {"copy-digits": {}},
    "kafka": {"bootstrap.servers": "kafka:9093"},
    "inference": SERVERS,
    "weights": {"store": pods.WEIGHTS},
}
AGENTS: dict[str, Any] = {
    **PLAIN,
    "envs": {"agents": {"sessions": {"rewards": ["reward"]}}},
    "gateway": GATEWAY,
}


def manifests(settings: dict[str, Any] = SETTINGS, **more: Any) -> dict[tuple[str, str], Any]:
    made = pods.manifests(parse({**settings, **more}))
    found = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in made}
    assert len(found) == len(made)
    return found


def workloads(settings: dict[str, Any] = SETTINGS, **more: Any) -> dict[str, Any]:
    kinds = ("Deployment", "StatefulSet", "Job")
    return {name: m for (kind, name), m in manifests(settings, **more).items() if kind in kinds}


def container(workload: Any) -> Any:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return found


def test_parts_that_are_numbered_are_a_set_and_the_others_deployments():
    assert {name: found["kind"] for name, found in workloads().items()} == {
        "learner": "Deployment",
        "inference": "StatefulSet",
        "inference-judge": "StatefulSet",
        "buffer": "Deployment",
        "batcher": "Deployment",
        "env-copy-digits": "StatefulSet",
        "env-served": "StatefulSet",
        "assembler": "Deployment",
        "gateway": "StatefulSet",
        "orchestrator": "Job",
    }
    assert (
        workloads(PLAIN, buffer={"shards": 2}, topics={"partitions": 2})["buffer"]["spec"][
            "replicas"
        ]
        == 2
    )
    hosted = {"one": {"kind": "add-digits", "host": "all"}}
    assert workloads({**PLAIN, "envs": hosted})["host-all"]["kind"] == "Deployment"


def test_each_has_the_command_of_its_parts():
    commands = {name: container(found)["command"] for name, found in workloads().items()}
    for name, role, *options in (
        ("learner", "learner"),
        ("inference", "inference", "--index", "$(POD_INDEX)"),
        ("inference-judge", "inference", "--index", "$(POD_INDEX)", "--pool", "judge"),
        ("env-copy-digits", "env", "copy-digits", "--index", "$(POD_INDEX)"),
        ("gateway", "gateway", "--index", "$(POD_INDEX)", "--port", "8700"),
        ("orchestrator", "orchestrator"),
    ):
        assert commands[name] == ["streamrl", role, pods.RUN_FILE, *options]


def test_images_are_those_of_what_a_part_computes_with():
    images = {name: container(found)["image"] for name, found in workloads().items()}
    assert images["learner"] == "streamrl/learner"
    assert images["inference"] == images["inference-judge"] == "streamrl/inference"
    assert images["env-served"] == "streamrl/env-server"
    assert images["buffer"] == images["orchestrator"] == "streamrl/core"


def test_every_workload_has_the_replicas_of_the_run_file():
    """A resume applies them to those that the end of the run has scaled to none."""
    more = {**SETTINGS["inference"], "replicas": 4}
    replicas = {
        name: found["spec"].get("replicas") for name, found in workloads(inference=more).items()
    }
    assert replicas == {
        **dict.fromkeys(replicas, 1),
        "env-copy-digits": 3,
        "inference": 4,
        "orchestrator": None,
    }


def test_a_container_has_what_placement_reserves_for_it():
    placed = {
        "learner": {"devices": [0, 1, 2, 3], "cpus": 16, "memory_gib": 64},
        "inference": {},
        "env": {"cpus": 0.5, "memory_gib": 1.5},
    }
    found = workloads(placement=placed)
    learner = container(found["learner"])["resources"]
    assert learner["requests"] == {
        "cpu": "16",
        "memory": "65536Mi",
        "ephemeral-storage": "10Gi",
        "nvidia.com/gpu": 4,
    }
    assert learner["limits"]["nvidia.com/gpu"] == 4 and learner["limits"]["memory"] == "65536Mi"
    assert container(found["env-copy-digits"])["resources"]["requests"]["memory"] == "1536Mi"
    assert container(found["buffer"])["resources"]["limits"]["memory"] == "4Gi"
    keys = {
        name: [toleration["key"] for toleration in m["spec"]["template"]["spec"]["tolerations"]]
        for name, m in found.items()
    }
    assert "nvidia.com/gpu" in keys["learner"] and "nvidia.com/gpu" not in keys["buffer"]


def test_servers_have_a_gpu_each_of_those_that_they_share():
    placed = {"learner": {}, "inference": {"devices": [0, 1, 2, 3]}}
    found = workloads(PLAIN, inference={**SERVERS, "replicas": 4}, placement=placed)
    assert container(found["inference"])["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize(
    ("amounts", "told"),
    [
        ({"cpus": 2}, "env-copy-digits-0 2 CPUs, env-copy-digits-1 1 CPU"),
        ({"memory_fraction": 0.5}, "FRACTION 0.5, env-copy-digits-1 1 CPU"),
    ],
)
def test_pods_that_would_differ_are_refused(amounts: dict[str, Any], told: str):
    placed = {"learner": {}, "inference": {}, "env-copy-digits-0": amounts}
    with pytest.raises(ConfigError, match=told):
        manifests(placement=placed)


def test_a_part_with_gpus_and_no_given_memory_has_no_limit_of_it():
    """What it needs grows with its model: it would be killed at a limit that fits another."""
    placed = {"learner": {"devices": [0]}, "inference": {"devices": [1]}}
    found = workloads(PLAIN, placement=placed)
    for name in ("learner", "inference"):
        resources = container(found[name])["resources"]
        assert "memory" in resources["requests"] and "memory" not in resources["limits"]
    without = container(workloads()["learner"])["resources"]
    assert without["limits"]["memory"] == "8Gi"


def test_parts_with_several_gpus_have_memory_for_those_to_meet_in():
    def shared(found: Any) -> bool:
        mounts = [mount["mountPath"] for mount in container(found).get("volumeMounts", ())]
        volumes = {
            volume["name"]: volume for volume in found["spec"]["template"]["spec"]["volumes"]
        }
        assert ("shm" in volumes) == ("/dev/shm" in mounts)
        return "/dev/shm" in mounts

    placed = {"learner": {"devices": [0, 1]}, "inference": {"devices": [2]}}
    found = workloads(PLAIN, placement=placed)
    assert [name for name, each in found.items() if shared(each)] == ["learner", "inference"]
    placed["learner"] = {"devices": [0]}
    assert not shared(workloads(PLAIN, placement=placed)["learner"])


# What each of these settings is changed to does not work in pods.
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kafka": {}}, r"kafka\.bootstrap\.servers is not set; write the HOST:PORT"),
        (
            {"kafka": {"bootstrap.servers": "localhost:9092"}},
            "localhost:9092 is reached from its own machine only",
        ),
        ({"inference": {"port": 8000}}, r"inference\.host 127\.0\.0\.1 .* write env:POD_IP"),
        (
            {"inference": {**SERVERS, "port": 0}},
            r"inference\.port 0: the run's 1 servers .* 8000 to 8099; write 8000",
        ),
        ({"inference": {**SERVERS, "port": 8099, "replicas": 2}}, "8099: the run's 2 servers"),
        ({"gateway": {**GATEWAY, "port": 8701}}, r"gateway\.port 8701: .* 8700; write that"),
        (
            {"gateway": {**GATEWAY, "host": "127.0.0.1"}},
            r"gateway\.host 127\.0\.0\.1 .* write 0\.0\.0\.0",
        ),
        ({"metrics": {"serve": False}}, r"metrics\.serve: false: .* leave it out"),
        ({"weights": {}}, r"weights\.store is empty; write /var/lib/streamrl/weights"),
        ({"weights": {"store": "/data/w"}}, "/data/w is no volume of the pods"),
        ({"weights": {"store": "runs/weights"}}, "runs/weights is no volume of the pods"),
        ({"runs_dir": "/data/runs"}, "runs_dir /data/runs is no volume of the pods"),
        (
            {"placement": {"learner": {"devices": [0]}, "inference": {"devices": [0]}}},
            "learner and inference-0 share device 0, and pods share none",
        ),
        ({"inference": {**SERVERS, "pools": {"p" * 43: {}}}}, r"53 characters .* shorten it by 1"),
        ({"envs": {"e" * 50: {}}}, r"54 characters .* take 52; shorten it by 2"),
        (
            {"envs": {"one": {"kind": "add-digits", "host": "h" * 60}}},
            r"65 characters .* take 63; shorten it by 2",
        ),
    ],
)
def test_a_run_that_cannot_work_there_is_refused(changed: dict[str, Any], told: str):
    settings = {**AGENTS, **changed}
    (problem,) = pods.obstacles(parse(settings))
    assert re.search(told, problem), problem
    with pytest.raises(ConfigError, match=told):
        manifests(settings)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as refused:
        manifests({"run": "r", "envs": {"copy-digits": {}}})
    text = str(refused.value)
    for setting in ("kafka.bootstrap.servers", "inference.host", "inference.port", "weights.store"):
        assert setting in text
    assert "gateway" not in text, "the run has none"


@pytest.mark.parametrize(
    "store", ["/var/lib/streamrl/weights/mine", "weights", "s3://bucket", f"file://{pods.WEIGHTS}"]
)
def test_weights_are_on_the_volume_or_in_a_store_of_objects(store: str):
    assert not list(pods.obstacles(parse({**PLAIN, "weights": {"store": store}})))


def test_a_run_without_servers_of_its_own_needs_no_address_for_them():
    assert not list(pods.obstacles(parse({**PLAIN, "inference": {"replicas": 0}})))


def test_the_processes_of_a_learner_meet_at_the_first_and_share_a_volume():
    batcher = {"total_token_budget": 3000, "processes": 2, "row_count": 2}
    found = manifests(learner={"processes": 2}, batcher=batcher)
    gang = found["StatefulSet", "learner"]
    assert gang["spec"]["replicas"] == 2
    assert container(gang)["command"][3:] == [
        *("--processes", "2", "--index", "$(POD_INDEX)"),
        *("--coordinator", "learner-0.parts:8476"),
    ]
    # A process of another template could not start while the others run.
    assert gang["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert "updateStrategy" not in found["StatefulSet", "inference"]["spec"]
    claim = found["PersistentVolumeClaim", "learner"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert found["Service", "parts"]["spec"]["publishNotReadyAddresses"]


def test_a_learner_that_is_to_end_has_the_time_for_a_checkpoint():
    limits = {
        name: found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for name, found in workloads().items()
    }
    assert limits.pop("learner") == 600
    assert set(limits.values()) == {60}


def test_agents_have_a_service_to_call():
    service = manifests()["Service", "gateway"]["spec"]
    assert service["ports"][0]["port"] == 8700
    labels = workloads()["gateway"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert ("Service", "gateway") not in manifests(PLAIN)


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_every_part_of_every_run_file_is_a_pod(file: Path):
    run = run_file.load(file)
    made = pods.workloads(run)
    parts = [part.name for workload in made for part in workload.parts]
    assert sorted(parts) == sorted({part.name for part in topology.parts(run)})
