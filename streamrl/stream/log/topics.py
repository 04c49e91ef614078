"""Topics as code: each kind of topic has a template in `topics/*.yaml`, and a run's topics follow
from these templates and its run file. `render` writes manifests for Strimzi; `topic_changes.py`
makes the topics.

A template states the topic's records and key in its annotations, and explains them in its comments.
Parts name a topic without the run (`rollouts.copy-digits`). On the broker its name is
`<run>.<topic>`, so two runs never share a topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, Literal

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.system.errors import ConfigError
from streamrl.system.files import shipped_directory
from streamrl.system.manifests import to_yaml
from streamrl.system.yaml_reader import from_yaml

# Settings by which a broker deletes records begin with one of these.
DELETING = ("retention.", "local.retention.", "cleanup.policy")
# What replay, fork and rescore read months later. Kafka has no tiered storage for compacted topics.
TIERED = (topology.ROLLOUTS, topology.TURNS, topology.GROUPS, topology.BATCHES)
# Settings of the journals of envs: a process that starts needs the last progress of each replica,
# and reads little besides.
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": 16_777_216,
    "min.cleanable.dirty.ratio": 0.1,
}
# These annotations keep Argo CD and Helm from deleting a topic with its manifest.
KEPT = {
    "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
    "helm.sh/resource-policy": "keep",
}


@dataclass(frozen=True)
class Kind:
    """A kind of topic, as its template in topics/ describes it."""

    name: str
    per: Literal["run", "env", "part", "topic"]  # a run has one such topic for each of these
    records: tuple[str, ...]  # the schemas in it, as records.RECORDS names them; empty for any
    key: str
    has_dead_letters: bool
    text: str


@dataclass(frozen=True)
class Topic:
    """A topic that a run should have."""

    name: str  # its name on the broker, which begins with the run's
    kind: Kind
    manifest: Mapping[str, Any]  # Strimzi's KafkaTopic

    @property
    def partitions(self) -> int:
        return self.manifest["spec"]["partitions"]

    @property
    def replicas(self) -> int:
        return self.manifest["spec"]["replicas"]

    @property
    def config(self) -> dict[str, str]:
        """The topic's settings on the broker, by Kafka's names."""
        return self.manifest["spec"]["config"]


def kinds() -> dict[str, Kind]:
    """All kinds of topics, by name."""
    directory = shipped_directory("topic_templates", "topics")
    return {path.stem: _kind(path) for path in sorted(directory.glob("*.yaml"))}


def _kind(path: Path) -> Kind:
    text = path.read_text()
    annotations: dict[str, Any] = {
        name.removeprefix("streamrl/"): value
        for name, value in from_yaml(text)["metadata"]["annotations"].items()
    }
    return Kind(
        name=path.stem,
        per=annotations["per"],
        records=tuple(filter(None, annotations["records"].split(","))),
        key=annotations["key"],
        has_dead_letters=annotations.get("dead-letters") == "true",
        text=text,
    )


def default_replicas(brokers: int) -> int:
    """The copies of each partition on a cluster of so many brokers, where the run file sets none:
    one of three may then be away.
    """
    return 3 if brokers >= 3 else 1


def plan(run: RunFile, cluster: str = "streamrl", replicas: int = 1) -> list[Topic]:
    """All topics of a run, sorted by kind. `cluster` is the name of Strimzi's Kafka resource,
    `replicas` the copies of each partition where the run file sets none.
    """
    templates = kinds().values()
    sources: list[str] = []
    for kind in templates:
        if kind.has_dead_letters:
            names = _names(kind, run, sources=[])
            sources += [f"{kind.name}.{name}" if name else kind.name for name in names]
    topics: list[Topic] = []
    for kind in templates:
        for name in _names(kind, run, sources):
            topics.append(_topic(kind, name, run, cluster, replicas))
    return topics


def _names(kind: Kind, run: RunFile, sources: list[str]) -> list[str]:
    """The env, part or topic after which each topic of a kind is named.

    `sources` are the topics whose unusable records are kept as dead letters.
    """
    match kind.per:
        case "run":
            return [""]
        case "env":
            if kind.name == topology.VISITS:
                return [name for name, env in run.envs.items() if env.pass_rate]
            if kind.name == topology.TURNS:
                return list(run.turn_envs)
            if kind.name == topology.REWARDS:
                return []  # `streamrl rescore` makes it
            return topology.families(run.envs)
        case "part":
            identities: list[str] = []
            for role in topology.roles():
                if role.has_journal and role.is_needed(run):
                    identities += [part.identity for part in role.parts(run)]
            return identities
        case "topic":
            return sources


def _topic(kind: Kind, of: str, run: RunFile, cluster: str, replicas: int) -> Topic:
    wanted = run.topics
    replicas = wanted.replicas or replicas
    values = {
        kind.per: of,
        "run": run.run,
        "cluster": cluster,
        "writers": ",".join(role.name for role in topology.writers(kind.name)),
        "readers": ",".join(role.name for role in topology.readers(kind.name)),
        "partitions": wanted.partitions,
        "replicas": replicas,
        # Writes continue while one replica is down, and each acknowledged record is on the others.
        "min_insync_replicas": max(1, replicas - 1),
        "retention_ms": round(wanted.retention_hours * 3_600_000),
    }
    manifest = from_yaml(Template(kind.text).substitute(values))
    config = manifest["spec"]["config"]
    if kind.name == topology.JOURNAL and topology.is_source(of):
        config |= COMPACTED
    # A topic without a time of retention is a part's state, or is needed to read the whole run. The
    # run file must not make the broker delete records from it.
    may_delete = config.get("retention.ms", -1) != -1
    for name, value in wanted.config.items():
        if may_delete or not name.startswith(DELETING):
            config[name] = value
    manifest["spec"]["config"] = {name: str(value) for name, value in config.items()}
    return Topic(manifest["metadata"]["name"], kind, manifest)


def topics_of_recorded_run(
    run: RunFile, partitions: Mapping[str, int], replicas: int = 1
) -> list[Topic]:
    """The topics of a recorded run, and those that its run file plans besides.

    `partitions` has the recorded topics without the run's name, and their numbers of partitions;
    `replicas` is that of `plan`.
    Raises ConfigError for a topic of an unknown kind.
    """
    templates = kinds()
    planned = {topic.name: topic for topic in plan(run, replicas=replicas)}
    for name, count in partitions.items():
        kind, _, of = name.partition(".")
        if kind not in templates:
            raise ConfigError(
                f"topic {name} is of no kind that streamrl knows: {', '.join(templates)}"
            )
        # A topic of an env that the run file no longer has is not planned.
        topic = planned.get(f"{run.run}.{name}")
        topic = topic or _topic(templates[kind], of, run, "streamrl", replicas)
        spec = {**topic.manifest["spec"], "partitions": count}
        planned[topic.name] = replace(topic, manifest={**topic.manifest, "spec": spec})
    return list(planned.values())


def render(run: RunFile, cluster: str = "streamrl", local_hours: float | None = None) -> str:
    """The run's KafkaTopics as YAML for `kubectl apply -f -`.

    With `local_hours`, topics of the kinds TIERED are in Kafka's tiered storage: brokers keep a
    record for so long, and the remote storage keeps it for the rest of `topics.retention_hours`.

    Strimzi deletes a topic when its manifest is deleted, so each manifest has the annotations that
    keep it. Raises ConfigError for a `local_hours` above the retention.
    """
    if local_hours is not None and local_hours > run.topics.retention_hours:
        raise ConfigError(
            f"--tiered {local_hours:g}: brokers cannot keep records for longer than"
            f" topics.retention_hours ({run.topics.retention_hours:g}); raise that"
        )
    manifests: list[dict[str, Any]] = []
    for topic in plan(run, cluster):
        metadata = topic.manifest["metadata"]
        annotations = {**metadata["annotations"], **KEPT}
        config = topic.config
        if local_hours is not None and topic.kind.name in TIERED:
            local_ms = round(local_hours * 3_600_000)
            tiered = {"remote.storage.enable": "true", "local.retention.ms": str(local_ms)}
            config = {**config, **tiered}
        manifests.append(
            {
                **topic.manifest,
                "metadata": {**metadata, "annotations": annotations},
                "spec": {**topic.manifest["spec"], "config": config},
            }
        )
    return to_yaml(manifests)
