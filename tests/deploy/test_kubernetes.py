"""deploy/kubernetes: as kubectl renders it, valid by the schemas of all kinds; and what has to
agree agrees.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError

import streamrl
from streamrl.cli.command import cli
from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import ServerEnv
from streamrl.envs.sessions.settings import Gateway
from streamrl.extensions.scorer.extension import Scorer
from streamrl.run.engines import kubernetes
from streamrl.run.engines.pods import GATEWAY_PORT, SERVER_PORTS, WEIGHTS
from streamrl.run.monitoring.verdict import TIME_OVER
from streamrl.run.orchestrator.plan import BROKER_GONE
from streamrl.stream.local_kafka.distribution import FILES
from streamrl.stream.log import topics
from streamrl.stream.log.kafka import acls
from streamrl.system.errors import TopicMissing
from tests.deploy import models
from tests.deploy.commands import check_command
from tests.deploy.kubectl import render

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("small", "production")
RELEASE = "1.37"  # of Kubernetes' schemas
WORKLOADS = ("Deployment", "StatefulSet", "Job")
# Below these every name is allowed: labels, quantities, Kafka's settings, files.
OPEN = {"labels", "annotations", "matchLabels", "requests", "limits", "config", "data", "selector"}
FINISH = "finish"  # the one pod that is no part
BUILTIN = {
    *(
        "ConfigMap",
        "Deployment",
        "Job",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
    ),
    *("Role", "RoleBinding", "Service", "ServiceAccount", "StatefulSet"),
}
Manifest = dict[str, Any]


@cache
def manifests(overlay: str) -> tuple[Manifest, ...]:
    return tuple(render(KUBERNETES / "overlays" / overlay))


def of(overlay: str, *kinds: str) -> dict[str, Manifest]:
    found = {m["metadata"]["name"]: m for m in manifests(overlay) if m["kind"] in kinds}
    return {name: m for name, m in found.items() if kinds != WORKLOADS or name != FINISH}


@cache
def run_of(overlay: str) -> RunFile:
    return run_file.load(KUBERNETES / "overlays" / overlay / "run.yaml")


def users_of(overlay: str) -> str:
    return (KUBERNETES / "overlays" / overlay / "users.yaml").read_text()


def pod(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def part(workload: Manifest) -> Manifest:
    (container,) = pod(workload)["containers"]
    return container


def variables(workload: Manifest) -> dict[str, Any]:
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in part(workload)["env"]
    }


def check(manifest: Manifest) -> None:
    """Raises ValueError for whatever its schema does not have."""
    if manifest["kind"] in models.KINDS:
        models.check(manifest)  # a ValidationError is a ValueError
        return
    # It takes 8 s to import: not in every worker of the tests.
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, RELEASE, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise ValueError(str(error)) from None


# ---- schemas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_valid_by_its_schema(overlay: str):
    assert {m["kind"] for m in manifests(overlay)} <= BUILTIN | set(models.KINDS)
    for manifest in manifests(overlay):
        check(manifest)


@pytest.mark.parametrize("kind", sorted(BUILTIN | set(models.KINDS)))
def test_a_misspelt_field_is_refused_wherever_it_stands(kind: str):
    """Every field of the largest manifest of the kind, one after another."""
    of_kind = [m for overlay in OVERLAYS for m in manifests(overlay) if m["kind"] == kind]
    manifest = max(of_kind, key=lambda m: len(yaml.safe_dump(m)))
    seen = 0
    for way in fields(manifest):
        if way in (("kind",), ("apiVersion",)):
            continue  # by them the schema is found
        spoilt = copy.deepcopy(manifest)
        place: Any = spoilt
        for step in way[:-1]:
            place = place[step]
        place[f"{way[-1]}x"] = place.pop(way[-1])
        with pytest.raises((ValueError, ValidationError)):
            check(spoilt)
        seen += 1
    assert seen > 2


def fields(value: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a field with a name of the schema's stands."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*way, name)
            if name not in OPEN or (name == "selector" and "matchLabels" in inner):
                yield from fields(inner, (*way, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:2]):
            yield from fields(inner, (*way, index))


# ---- what follows from the run file --------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_topics_users_and_parts_are_what_the_run_file_makes_of_them(overlay: str):
    here = KUBERNETES / "overlays" / overlay
    run = run_of(overlay)
    for name, text in kubernetes.files(run).items():
        assert (here / name).read_text() == text, "run `python -m tests.deploy.manifests`"
    assert set(of(overlay, "KafkaTopic")) == {topic.name for topic in topics.plan(run)}
    assert yaml.safe_load(
        of(overlay, "ConfigMap").popitem()[1]["data"]["run.yaml"]
    ) == yaml.safe_load((here / "run.yaml").read_text())


def test_the_command_line_writes_users_for_kubectl():
    file = str(KUBERNETES / "overlays" / "small" / "run.yaml")
    written = CliRunner().invoke(cli, ["topics", "acls", "--render", "--cluster", "other", file])
    assert written.exit_code == 0 and written.output.replace(
        "cluster: other", "cluster: streamrl"
    ) == users_of("small")
    assert CliRunner().invoke(cli, ["topics", "acls", "--render", "--apply", file]).exit_code == 2


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_user_may_do_what_the_access_rules_say_and_nothing_else(overlay: str):
    """Read from the manifest itself, as Strimzi's user operator makes rules of it."""
    words = {"transactionalId": "transactional-id"}
    for role, rules in acls.rules(run_of(overlay)).items():
        spec = of(overlay, "KafkaUser")[f"demo.{role}"]["spec"]
        allowed = {
            (
                words.get(acl["resource"]["type"], acl["resource"]["type"]),
                acl["resource"]["name"],
                acl["resource"]["patternType"],
                operation.upper(),
            )
            for acl in spec["authorization"]["acls"]
            for operation in acl["operations"]
        }
        assert allowed == {
            (r.resource, r.name, "prefix" if r.prefixed else "literal", operation)
            for r in rules
            for operation in r.operations
        }
        assert all(
            acl.get("host", "*") == "*" and acl.get("type", "allow") == "allow"
            for acl in spec["authorization"]["acls"]
        )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_part_has_its_own_user_and_a_command_for_something_that_the_run_file_has(overlay: str):
    users = of(overlay, "KafkaUser")
    for name, workload in of(overlay, *WORKLOADS).items():
        given = variables(workload)
        secret = given["STREAMRL_KAFKA_PASSWORD"]["secretKeyRef"]
        user = "demo.inference" if name in pools_of(run_of(overlay)) else f"demo.{name}"
        assert given["STREAMRL_KAFKA_USER"] == secret["name"] == user in users
        assert secret["key"] == "password"
        for index in (0, workload["spec"].get("replicas", 1) - 1):
            words = [word.replace("$(POD_INDEX)", str(index)) for word in part(workload)["command"]]
            check_command(
                words,
                {"/etc/streamrl/run.yaml": str(KUBERNETES / "overlays" / overlay / "run.yaml")},
            )
        assert ("$(POD_INDEX)" in part(workload)["command"]) == ("POD_INDEX" in given)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_there_is_a_part_for_everything_in_the_run_file(overlay: str):
    run = run_of(overlay)
    workloads = of(overlay, *WORKLOADS)
    wanted = {
        "buffer",
        "batcher",
        "orchestrator",
        "learner",
        "inference",
        *(f"env-{name}" for name in run_by_streamrl(run)),
    }
    wanted |= {"scorer"} if run.learner.needs_scores else set()
    wanted |= {"evaluator"} if run.eval.interval else set()
    wanted |= {"gateway", "assembler"} if run.session_envs else set()
    wanted |= {f"env-{name}" for name in servers_of(run)} | pools_of(run).keys()
    assert set(workloads) == wanted
    for name in servers_of(run):
        server = workloads[f"env-{name}"]
        assert server["spec"]["replicas"] == run.envs[name].replicas
        given = variables(server)
        assert given["STREAMRL_GATEWAY_URL"] == f"http://gateway:{run.settings_of(Gateway).port}"
        settings = run.envs[name]
        assert isinstance(settings, ServerEnv) and settings.api_key.removeprefix("env:") in given
        assert run.settings_of(Gateway).signing_secret.removeprefix("env:") not in given
        assert "STREAMRL_INFERENCE_KEY" not in given  # it asks no server
    for name, size in pools_of(run).items():
        assert workloads[name]["spec"]["replicas"] == size
        assert references(run) <= set(variables(workloads[name]))
    if run.session_envs:
        assert workloads["gateway"]["spec"]["replicas"] == run.settings_of(Gateway).replicas
        secret = run.settings_of(Gateway).signing_secret.removeprefix("env:")
        assert secret in variables(workloads["gateway"])
    if run.learner.needs_scores:
        assert workloads["scorer"]["spec"]["replicas"] == run.settings_of(Scorer).replicas
    for name in ("buffer", "batcher"):
        assert workloads[name]["spec"]["replicas"] == 1 and workloads[name]["spec"]["strategy"] == {
            "type": "Recreate"
        }
    needed = references(run)
    for name in ("inference", "learner", *(f"env-{env}" for env in run_by_streamrl(run))):
        asked = (
            needed
            if name == "inference"
            else (
                needed - {"POD_IP"}
                if name.startswith("env-")
                else needed - {"POD_IP", "STREAMRL_INFERENCE_KEY"}
            )
        )
        assert asked <= set(variables(workloads[name])), name


def run_by_streamrl(run: RunFile) -> list[str]:
    """The envs that have processes of their own. Agents of the others call the gateway."""
    return [name for name in run.envs if name not in run.session_envs]


def servers_of(run: RunFile) -> list[str]:
    """The envs with a Python of their own, whose processes call the gateway."""
    return [name for name, env in run.envs.items() if isinstance(env, ServerEnv)]


def pools_of(run: RunFile) -> dict[str, int]:
    """The sizes of the pools other than the policy's, by the names of their workloads."""
    return {f"inference-{name}": pool.replicas for name, pool in run.inference.pools.items()}


def references(run: RunFile) -> set[str]:
    """Variables that the run file refers to."""
    texts = (run.inference.host, run.inference.api_key, *map(str, run.kafka.values()))
    return {text.removeprefix("env:") for text in texts if text.startswith("env:")}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_mounted_lies_where_the_run_file_looks(overlay: str):
    run = run_of(overlay)
    workloads = of(overlay, *WORKLOADS)
    for name, workload in workloads.items():
        mounts = {mount["mountPath"]: mount for mount in part(workload)["volumeMounts"]}
        assert (
            Path(run.kafka["ssl.ca.location"]).parent == Path("/etc/streamrl/kafka")
            and "/etc/streamrl/kafka" in mounts
        )
        assert mounts["/var/lib/streamrl/runs"]["name"] == "runs"
        if name in ("learner", "inference") and run.weights.store.startswith("/"):
            assert mounts[run.weights.store].get("readOnly", False) == (name == "inference")
        if name in ("learner", "scorer") and run.model.path:
            assert mounts[run.model.path]["readOnly"]
    if run.weights.store.startswith("/"):
        assert run.weights.store == WEIGHTS, "what render takes for mounted"
    (runs,) = (
        volume for volume in pod(workloads["learner"])["volumes"] if volume["name"] == "runs"
    )
    claim = runs["persistentVolumeClaim"]["claimName"]
    assert claim in of(overlay, "PersistentVolumeClaim"), "checkpoints outlive the pod"


# ---- scaling, protection, network ----------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_workload_has_the_replicas_of_the_run_file_which_a_resume_gives_it_again(overlay: str):
    run = run_of(overlay)
    workloads = of(overlay, *WORKLOADS)
    assert workloads["inference"]["spec"]["replicas"] == run.inference.replicas
    for name in run_by_streamrl(run):
        assert workloads[f"env-{name}"]["spec"]["replicas"] == run.envs[name].replicas


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_learner_of_several_processes_has_what_that_of_one_has(overlay: str, tmp_path: Path):
    """It is a StatefulSet, which patches for a Deployment would pass over."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    here = tmp_path / "kubernetes" / "overlays" / overlay
    run = yaml.safe_load((here / "run.yaml").read_text())
    run["learner"]["processes"] = 2
    run["batcher"] |= {"processes": 2, "row_count": 64}
    (here / "run.yaml").write_text(yaml.safe_dump(run))
    for name, text in kubernetes.files(run_file.load(here / "run.yaml")).items():
        (here / name).write_text(text)
    gang = next(
        manifest
        for manifest in render(here)
        if (manifest["kind"], manifest["metadata"]["name"]) == ("StatefulSet", "learner")
    )
    alone = of(overlay, "Deployment")["learner"]
    assert part(gang)["volumeMounts"] == part(alone)["volumeMounts"]
    assert part(gang).get("envFrom") == part(alone).get("envFrom")
    assert {volume["name"] for volume in pod(gang)["volumes"]} == {
        volume["name"] for volume in pod(alone)["volumes"]
    }
    assert pod(gang)["serviceAccountName"] == pod(alone)["serviceAccountName"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_select_what_they_are_meant_to(overlay: str):
    workloads = of(overlay, *WORKLOADS)
    for workload in workloads.values():
        assert workload["kind"] == "Job" or selects(workload["spec"]["selector"], labels(workload))
    for name, budget in of(overlay, "PodDisruptionBudget").items():
        assert [
            other
            for other, workload in workloads.items()
            if selects(budget["spec"]["selector"], labels(workload))
        ] == [name]
    assert set(of(overlay, "PodDisruptionBudget")) >= {
        "inference",
        *(name for name in workloads if name.startswith("env-")),
    }
    service = of(overlay, "Service")["parts"]
    assert all(
        selects({"matchLabels": service["spec"]["selector"]}, labels(workload))
        for workload in workloads.values()
    )
    assert {w["spec"]["serviceName"] for w in of(overlay, "StatefulSet").values()} == {"parts"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_parts_reach_whom_they_need_and_nobody_else(overlay: str):
    pods = {name: labels(workload) for name, workload in of(overlay, *WORKLOADS).items()}
    kafka = {"strimzi.io/cluster": "streamrl", "strimzi.io/kind": "Kafka"}
    for name, own in pods.items():
        assert leaves(overlay, own, kafka, 9093), name
        assert not leaves(overlay, own, {"app": "somebody"}, 5432), name
        is_server = own["streamrl/role"] == "env-server"
        may = (name.startswith("env-") and not is_server) or name == "gateway"
        first, *_, last = SERVER_PORTS
        for port in (first - 1, first, last, last + 1):
            assert (
                leaves(overlay, own, pods["inference"], port)
                and enters(overlay, own, pods["inference"], port)
            ) == (may and port in SERVER_PORTS), name
        assert not leaves(overlay, own, pods["inference"], 22)
        for judge in pools_of(run_of(overlay)):
            asks = own["streamrl/role"] in ("env", "evaluator")
            assert leaves(overlay, own, pods[judge], 8004) == asks, name
            assert enters(overlay, own, pods[judge], 8004) == asks, name
        if "gateway" in pods:
            assert leaves(overlay, own, pods["gateway"], GATEWAY_PORT) == is_server, name
            assert enters(overlay, own, pods["gateway"], GATEWAY_PORT) == is_server, name
        assert not enters(overlay, {"app": "somebody"}, own, 8000), name
        assert enters(overlay, {"streamrl/agent": "true"}, own, 8700) == (name == "gateway"), name
        assert not enters(overlay, {"app": "somebody"}, own, 8700), name
        object_store = name in ("learner", "inference", "scorer", "evaluator") and run_of(
            overlay
        ).weights.store.startswith("s3")
        assert not leaves(overlay, own, {"app": "somebody"}, 443), name
        for address, port in (
            ("52.218.0.1", 443),
            ("169.254.169.254", 80),
            ("169.254.170.23", 80),
            ("169.254.169.252", 988),
        ):
            assert calls(overlay, own, address, port) == object_store, (name, address)
        assert not any(
            calls(overlay, own, address, port)
            for address in ("10.0.0.1", "169.254.169.254", "192.168.1.1")
            for port in (443, 6443)
        ), name
        assert calls(overlay, own, "169.254.20.10", 53) and not calls(
            overlay, own, "8.8.8.8", 53
        ), "the node's own name server, and no other"
        assert names(overlay, own, "kube-system", {"k8s-app": "kube-dns"}, 53) and names(
            overlay, own, "openshift-dns", {}, 5353
        )
        assert names(overlay, own, "minio", {}, 9000) == object_store and not names(
            overlay, own, "default", {}, 9000
        )


def labels(workload: Manifest) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def selects(selector: Manifest, own: dict[str, str]) -> bool:
    """Does a label selector select a pod with these labels? An empty one does."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    chosen = all(own.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    for wanted in selector.get("matchExpressions", ()):
        assert wanted["operator"] == "In"
        chosen = chosen and own.get(wanted["key"]) in wanted["values"]
    return chosen


def leaves(overlay: str, source: dict[str, str], to: dict[str, str], port: int) -> bool:
    return _passes(overlay, "Egress", "to", source, to, port)


def enters(overlay: str, source: dict[str, str], to: dict[str, str], port: int) -> bool:
    return _passes(overlay, "Ingress", "from", to, source, port)


def calls(overlay: str, source: dict[str, str], address: str, port: int) -> bool:
    """May a pod with these labels reach an address outside of all pods?"""
    return any(_holds(peer.get("ipBlock"), address) for peer in _peers(overlay, source, port))


def names(
    overlay: str, source: dict[str, str], namespace: str, to: dict[str, str], port: int
) -> bool:
    """May it reach pods with these labels in another namespace?"""
    there = {"kubernetes.io/metadata.name": namespace}
    found = [peer for peer in _peers(overlay, source, port) if "namespaceSelector" in peer]
    return any(
        selects(peer["namespaceSelector"], there) and selects(peer.get("podSelector", {}), to)
        for peer in found
    )


def _peers(overlay: str, source: dict[str, str], port: int) -> Iterator[Manifest]:
    for policy in of(overlay, "NetworkPolicy").values():
        if "Egress" in policy["spec"]["policyTypes"] and selects(
            policy["spec"]["podSelector"], source
        ):
            for rule in policy["spec"].get("egress", ()):
                if _within(rule, port):
                    yield from rule["to"]


def _holds(block: Manifest | None, address: str) -> bool:
    ip = ip_address(address)
    return (
        block is not None
        and ip in ip_network(block["cidr"])
        and not any(ip in ip_network(less) for less in block.get("except", ()))
    )


def _passes(
    overlay: str, direction: str, peers: str, own: dict[str, str], other: dict[str, str], port: int
) -> bool:
    """By the policies of a pod: all is allowed when there are none of that direction, else what one
    of them allows. Pods of the same namespace.
    """
    policies = [
        p["spec"]
        for p in of(overlay, "NetworkPolicy").values()
        if direction in p["spec"]["policyTypes"] and selects(p["spec"]["podSelector"], own)
    ]
    rules = [rule for policy in policies for rule in policy.get(direction.lower(), ())]
    return not policies or any(
        _within(rule, port) and _named(rule.get(peers), other) for rule in rules
    )


def _within(rule: Manifest, port: int) -> bool:
    return "ports" not in rule or any(
        isinstance(p["port"], int) and p["port"] <= port <= p.get("endPort", p["port"])
        for p in rule["ports"]
    )


def _named(peers: list[Manifest] | None, other: dict[str, str]) -> bool:
    return peers is None or any(
        "podSelector" in peer
        and "namespaceSelector" not in peer
        and selects(peer["podSelector"], other)
        for peer in peers
    )


# ---- pods and nodes ------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_rights_have_probes_and_say_what_they_need(overlay: str):
    for name, workload in of(overlay, *WORKLOADS).items():
        container = part(workload)
        own = pod(workload)
        assert (
            own["securityContext"]["runAsNonRoot"] and own["securityContext"]["runAsUser"] == 10001
        ), "the user of the images"
        assert (
            own["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            and not own["automountServiceAccountToken"]
        )
        safe = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["securityContext"] == safe
        paths = [
            container[f"{kind}Probe"]["httpGet"]["path"]
            for kind in ("startup", "liveness", "readiness")
        ]
        assert paths == ["/livez", "/livez", "/readyz"], name
        port = {
            "name": "metrics",
            "containerPort": int(variables(workload)["STREAMRL_METRICS_PORT"]),
        }
        assert container["ports"] == [port] and workload["spec"]["template"]["metadata"][
            "annotations"
        ]["prometheus.io/port"] == str(port["containerPort"])
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["requests"])
        assert {"memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
        assert all(
            "sizeLimit" in volume["emptyDir"] for volume in own["volumes"] if "emptyDir" in volume
        ), f"{name}: a disk that fills up is its own"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_learner_may_write_weights_and_envs_have_no_rights_at_all(overlay: str):
    accounts = of(overlay, "ServiceAccount")
    assert not any(
        account.get("automountServiceAccountToken", True)
        for name, account in accounts.items()
        if name != "streamrl-finish"
    )
    readers = {"inference", "scorer", "evaluator"}
    for name, workload in of(overlay, *WORKLOADS).items():
        kind = "writer" if name == "learner" else "reader" if name in readers else ""
        account = pod(workload)["serviceAccountName"]
        assert (
            account == (f"streamrl-weights-{kind}" if kind else "streamrl") and account in accounts
        ), name
        secrets = {source["secretRef"]["name"] for source in part(workload).get("envFrom", ())}
        assert secrets == (
            {f"streamrl-store-{kind}"} if kind and overlay == "production" else set()
        ), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_tag_has_the_version_of_the_code(overlay: str):
    """A tag that is built again gives a node that comes later other code than the rest."""
    for name, workload in of(overlay, *WORKLOADS).items():
        assert part(workload)["image"].rpartition(":")[2] in (
            f"{streamrl.__version__}-cpu",
            f"{streamrl.__version__}-gpu",
        ), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_two_pods_are_the_same_part_for_they_are_started_again_after_every_exit_code(
    overlay: str,
):
    """After 76, too, which says that another process has their identity. Only a Job can tell exit
    codes apart.
    """
    for name, workload in of(overlay, *WORKLOADS).items():
        spec = workload["spec"]
        if workload["kind"] == "Deployment":
            assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}, name
        elif workload["kind"] == "Job":
            assert spec.get("parallelism", 1) == 1 and "podFailurePolicy" in spec, name
        else:  # A StatefulSet has one pod of each ordinal.
            is_numbered = "$(POD_INDEX)" in part(workload)["command"]
            assert is_numbered or spec["replicas"] == 1, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_end_of_a_run_stops_every_workload_and_keeps_its_report(overlay: str):
    orchestrator = of(overlay, "Job")["orchestrator"]
    finish = of(overlay, "Job")[FINISH]
    (runs,) = (volume for volume in pod(orchestrator)["volumes"] if volume["name"] == "runs")
    assert runs["persistentVolumeClaim"]["claimName"] == "results" and "results" in of(
        overlay, "PersistentVolumeClaim"
    )
    policy = orchestrator["spec"]["podFailurePolicy"]["rules"]
    codes = {
        code: rule["action"]
        for rule in policy
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert codes == {
        2: "FailJob",
        11: "FailJob",
        TIME_OVER: "FailJob",
        **dict.fromkeys((*BROKER_GONE, TopicMissing.exit_code), "Ignore"),
    }
    wait, stop = (
        container["args"]
        for container in (*pod(finish)["initContainers"], *pod(finish)["containers"])
    )
    assert wait[:2] == ["wait", "job/orchestrator"] and wait[-1] == "--timeout=-1s"
    assert stop == [
        "scale",
        "deployments,statefulsets",
        "--selector=app.kubernetes.io/part-of=streamrl",
        "--replicas=0",
    ]
    workloads = of(overlay, *WORKLOADS)
    for manifest in (w for w in workloads.values() if w["kind"] != "Job"):
        found = manifest["metadata"]["labels"]
        assert found["app.kubernetes.io/part-of"] == "streamrl", manifest["metadata"]["name"]
    rights = of(overlay, "Role")["streamrl-finish"]["rules"]
    allowed = {
        (group, kind): rule["verbs"]
        for rule in rights
        for group in rule["apiGroups"]
        for kind in rule["resources"]
    }
    assert "patch" in allowed["apps", "statefulsets/scale"] and "watch" in allowed["batch", "jobs"]
    assert (
        not any(
            "*" in verbs or "create" in verbs or "delete" in verbs for verbs in allowed.values()
        )
        and len(allowed) == 5
    )
    (subject,) = of(overlay, "RoleBinding")["streamrl-finish"]["subjects"]
    assert subject["name"] == pod(finish)["serviceAccountName"] == "streamrl-finish"


def test_copies_of_a_partition_stand_on_different_nodes():
    for pool in of("production", "KafkaNodePool").values():
        by = {
            c["topologyKey"]: c
            for c in pool["spec"]["template"]["pod"]["topologySpreadConstraints"]
        }
        assert (
            by["kubernetes.io/hostname"]["whenUnsatisfiable"] == "DoNotSchedule"
            and "topology.kubernetes.io/zone" in by
        )
        own = {"strimzi.io/cluster": "streamrl", "strimzi.io/pool-name": pool["metadata"]["name"]}
        assert all(c["labelSelector"] == {"matchLabels": own} for c in by.values())
    assert of("production", "Kafka")["streamrl"]["spec"]["kafka"]["rack"] == {
        "topologyKey": "topology.kubernetes.io/zone"
    }


def test_a_volume_for_one_node_is_mounted_on_one_node():
    (mode,) = of("small", "PersistentVolumeClaim")["weights"]["spec"]["accessModes"]
    assert mode == "ReadWriteOnce"
    (term,) = pod(of("small", "StatefulSet")["inference"])["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "kubernetes.io/hostname" and selects(
        term["labelSelector"], labels(of("small", "Deployment")["learner"])
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_topic_outlives_its_manifest_and_an_env_leaves_room_for_others(overlay: str):
    for topic in of(overlay, "KafkaTopic").values():
        assert (
            topic["metadata"]["annotations"]["argocd.argoproj.io/sync-options"]
            == "Prune=false,Delete=false"
        )
    for name, user in of(overlay, "KafkaUser").items():
        has_quotas = name.startswith("demo.env-") or name == "demo.gateway"
        assert ("quotas" in user["spec"]) == has_quotas, name


def test_gpus_are_asked_for_where_the_images_are_for_them_and_only_there():
    for overlay, with_gpu in (
        ("small", set[str]()),
        ("production", {"learner", "inference", "inference-judge", "scorer", "evaluator"}),
    ):
        workloads = of(overlay, *WORKLOADS)
        asking = {
            name
            for name, workload in workloads.items()
            if "nvidia.com/gpu" in part(workload)["resources"]["limits"]
        }
        assert (
            asking
            == {
                name
                for name, workload in workloads.items()
                if part(workload)["image"].endswith("-gpu")
            }
            == with_gpu
        )


def test_the_learner_of_production_has_a_gpu_for_each_process_of_the_batches():
    """Also a place for a version of 33 GB on its way to the object store: its claim, not /tmp."""
    learner = of("production", "Deployment")["learner"]
    run = run_file.load(KUBERNETES / "overlays" / "production" / "run.yaml")
    resources = part(learner)["resources"]
    for kind in ("requests", "limits"):
        assert resources[kind]["nvidia.com/gpu"] == run.batcher.processes == 8
    variables = {one["name"]: one.get("value") for one in part(learner)["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in part(learner)["volumeMounts"]}
    assert mounts[str(variables["TMPDIR"])] == "runs"
    (runs,) = (volume for volume in pod(learner)["volumes"] if volume["name"] == "runs")
    assert runs["persistentVolumeClaim"]["claimName"] == "learner"


def test_kafka_has_the_settings_of_the_local_one_and_copies_where_there_are_nodes():
    lines = (
        line.partition("=")
        for line in (FILES / "server.properties").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    local = {name: value for name, _, value in lines}
    for overlay, copies in (("small", 1), ("production", 3)):
        spec = of(overlay, "Kafka")["streamrl"]["spec"]["kafka"]
        # The operator takes a new Kafka later than this project: VERSION is 4.4.0.
        assert (spec["version"], spec["metadataVersion"]) == ("4.3.1", "4.3-IV0")
        settings = {name: str(value).lower() for name, value in spec["config"].items()}
        of_copies = {
            name: value
            for name, value in settings.items()
            if name.endswith((".replication.factor", ".isr", ".replicas"))
        }
        assert set(of_copies.values()) == ({"1"} if copies == 1 else {"2", "3"})
        assert (
            all(
                value == ("3" if name.endswith("factor") else "2")
                for name, value in of_copies.items()
            )
            or copies == 1
        )
        assert set(settings) <= set(local), "a misspelt one would be Kafka's own to find"
        assert {
            name: value for name, value in settings.items() if name not in of_copies
        }.items() <= local.items()
        pools = of(overlay, "KafkaNodePool").values()
        assert all(
            sum(pool["spec"]["replicas"] for pool in pools if role in pool["spec"]["roles"])
            == copies
            for role in ("controller", "broker")
        )
        assert {t.replicas for t in topics.plan(run_of(overlay))} == {copies}
