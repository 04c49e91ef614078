from typing import Any

import yaml
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.config.run_file import parse
from streamrl.run.engines import kubernetes

SETTINGS: dict[str, Any] = {
    "run": "r",
    "envs": {
        "copy-digits": {"replicas": 3, "fraction": 0.5},
        "outside": {"kind": "add-digits", "replicas": 0},
        "agents": {"sessions": {"rewards": ["reward"]}, "fraction": 0.1},
    },
    "batcher": {"total_token_budget": 3000},
    "inference": {"host": "env:POD_IP", "api_key": "env:STREAMRL_INFERENCE_KEY"},
    "gateway": {"signing_secret": "env:SECRET"},
}


def manifests(**settings: Any) -> dict[tuple[str, str], Any]:
    made = kubernetes.env_manifests(parse({**SETTINGS, **settings}))
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in made}


def test_an_env_with_processes_has_a_set_a_scale_and_a_budget():
    assert [*manifests()] == [
        ("StatefulSet", "env-copy-digits"),
        ("ScaledObject", "env-copy-digits"),
        ("PodDisruptionBudget", "env-copy-digits"),
    ]


def test_an_env_is_scaled_to_all_replicas_when_a_whole_batch_is_missing():
    spec = manifests()["ScaledObject", "env-copy-digits"]["spec"]
    assert spec["maxReplicaCount"] == 3
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["threshold"] == "1000"
    assert 'run="r"' in trigger["metadata"]["query"]
    assert 'environment=~"copy-digits|rest"' in trigger["metadata"]["query"]


def test_a_container_has_what_placement_reserves_for_it():
    def resources(**placement: Any) -> Any:
        placed = {"learner": {}, "inference": {}, "env": placement}
        stateful_set = manifests(placement=placed)["StatefulSet", "env-copy-digits"]
        (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
        return container["resources"]

    assert resources(cpus=0.5, memory_gib=1.5) == {
        "requests": {"cpu": "0.5", "memory": "1536Mi", "ephemeral-storage": "1Gi"},
        "limits": {"memory": "1536Mi", "ephemeral-storage": "4Gi"},
    }
    usual = resources()
    assert usual["requests"]["cpu"] == "1" and usual["limits"]["memory"] == "2Gi"


def test_the_command_prints_manifests(tmp_path: Any):
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(SETTINGS))
    done = CliRunner().invoke(cli, ["render", str(file), "--on", "kubernetes"])
    assert done.exit_code == 0, done.output
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all(done.output)]
    assert kinds == ["StatefulSet", "ScaledObject", "PodDisruptionBudget"]
