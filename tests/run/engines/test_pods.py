from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.config import run_file, topology
from streamrl.config.run_file import parse
from streamrl.run.engines import pods
from streamrl.system.errors import ConfigError

RUN_FILES = sorted((Path(__file__).parents[3] / "deploy" / "runs").glob("*.yaml"))

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
    "batcher": {"total_token_budget": 3000},
    "inference": {"host": "env:POD_IP", "api_key": "env:KEY", "pools": {"judge": {"model": "/m"}}},
    "gateway": {"signing_secret": "env:SECRET", "host": "0.0.0.0", "port": 8701},
}
PLAIN: dict[str, Any] = {"run": "r", "envs": {"copy-digits": {}}}


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


def variables(workload: Any) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") or entry for entry in container(workload)["env"]}


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
        ("gateway", "gateway", "--index", "$(POD_INDEX)", "--port", "8701"),
        ("orchestrator", "orchestrator"),
    ):
        assert commands[name] == ["streamrl", role, pods.RUN_FILE, *options]


def test_images_are_those_of_what_a_part_computes_with():
    images = {name: container(found)["image"] for name, found in workloads().items()}
    assert images["learner"] == "streamrl/learner"
    assert images["inference"] == images["inference-judge"] == "streamrl/inference"
    assert images["env-served"] == "streamrl/env-server"
    assert images["buffer"] == images["orchestrator"] == "streamrl/core"


def test_a_part_is_given_the_secrets_that_it_needs_and_no_others():
    names = {name: set(variables(found)) for name, found in workloads().items()}
    kafka = {"KAFKA_USER", "KAFKA_PASSWORD"}
    assert names["buffer"] == names["orchestrator"] == kafka
    assert names["learner"] == kafka | {"TMPDIR"}
    assert names["inference"] == names["inference-judge"] == kafka | {"POD_INDEX", "POD_IP", "KEY"}
    assert names["env-copy-digits"] == kafka | {"POD_INDEX", "KEY"}
    assert names["gateway"] == kafka | {"POD_INDEX", "KEY", "SECRET"}
    gateway = {"STREAMRL_GATEWAY_URL", "GATEWAY_KEY"}
    assert names["env-served"] == kafka | gateway | {"POD_INDEX"}
    users = {name: variables(found)["KAFKA_USER"] for name, found in workloads().items()}
    assert users["env-served"] == "r.env-served" and users["inference-judge"] == "r.inference"
    assert variables(workloads()["env-served"])["STREAMRL_GATEWAY_URL"] == "http://gateway:8701"
    assert not variables(workloads(PLAIN)["buffer"])


def test_an_env_is_scaled_to_all_replicas_when_a_whole_batch_is_missing():
    spec = manifests()["ScaledObject", "env-copy-digits"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 3)
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["threshold"] == "1000"
    assert 'run="r"' in trigger["metadata"]["query"]
    assert 'environment=~"copy-digits|rest"' in trigger["metadata"]["query"]
    # What is scaled by load has no number of its own, which applying it again would restore.
    assert "replicas" not in workloads()["env-copy-digits"]["spec"]
    assert workloads()["env-served"]["spec"]["replicas"] == 1


def test_servers_are_scaled_when_they_have_three_quarters_in_flight():
    more = {**SETTINGS["inference"], "max_num_seqs": 256, "replicas": 4}
    spec = manifests(inference=more)["ScaledObject", "inference"]["spec"]
    assert spec["minReplicaCount"] == spec["maxReplicaCount"] == 4
    assert spec["triggers"][0]["metadata"]["threshold"] == "192"


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
    found = workloads(PLAIN, inference={"replicas": 4}, placement=placed)
    assert container(found["inference"])["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_pods_that_would_differ_are_refused():
    placed = {"learner": {}, "inference": {}, "env-copy-digits-0": {"cpus": 2}}
    with pytest.raises(ConfigError, match="env-copy-digits-0 2 CPUs, env-copy-digits-1 1 CPU"):
        manifests(placement=placed)


def test_the_processes_of_a_learner_meet_at_the_first_and_share_a_volume():
    batcher = {**SETTINGS["batcher"], "processes": 2, "row_count": 2}
    found = manifests(learner={"processes": 2}, batcher=batcher)
    gang = found["StatefulSet", "learner"]
    assert gang["spec"]["replicas"] == 2
    assert container(gang)["command"][3:] == [
        *("--processes", "2", "--index", "$(POD_INDEX)"),
        *("--coordinator", "learner-0.parts:8476"),
    ]
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
    assert service["ports"][0]["port"] == 8701
    labels = workloads()["gateway"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert ("Service", "gateway") not in manifests(PLAIN)


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_every_part_of_every_run_file_is_a_pod(file: Path):
    run = run_file.load(file)
    made = pods.workloads(run)
    parts = [part.name for workload in made for part in workload.parts]
    assert sorted(parts) == sorted({part.name for part in topology.parts(run)})
    assert yaml.safe_dump(pods.manifests(run))
