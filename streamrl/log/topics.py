"""Topics as code: each kind of topic has a template in `topics/*.yaml`, and a run's topics follow
from these templates and its run file. `render` writes manifests for Strimzi, `apply` calls Kafka.

A template states the topic's records and key in its annotations, and explains them in its comments.
Parts name a topic without the run (`rollouts.copy-digits`). On the broker its name is
`<run>.<topic>`, so two runs never share a topic.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin does not list in __all__ the names that it re-exports.

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, Literal, TypeVar

import yaml
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.errors import AccessDenied, BrokerError, ConfigError, StreamrlError
from streamrl.log.kafka_admin import Admin, access_denied, call_with_retries

T = TypeVar("T")

# Settings by which a broker deletes records begin with one of these.
DELETING = ("retention.", "local.retention.", "cleanup.policy")
CALL_TIMEOUT_S = 10.0
REQUEST_RECORDS = 4_000  # the metadata records that one request to create topics may cause
SETTLE_LIMIT_S = 30.0  # within which a new topic has leaders, and a deleted one is gone


# ---- the plan ------------------------------------------------------------------------------------
# The longest name of a StatefulSet. Its pods have a label of that name and 11 more characters, and
# Kubernetes allows 63.
STATEFUL_SET_CHARS = 52
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
    package = Path(__file__).parents[1]
    directory = package / "topic_templates"
    if not directory.is_dir():  # It exists only where streamrl is installed as a package.
        directory = package.parent / "topics"
    return {path.stem: _kind(path) for path in sorted(directory.glob("*.yaml"))}


def _kind(path: Path) -> Kind:
    text = path.read_text()
    annotations: dict[str, Any] = {
        name.removeprefix("streamrl/"): value
        for name, value in yaml.safe_load(text)["metadata"]["annotations"].items()
    }
    return Kind(
        name=path.stem,
        per=annotations["per"],
        records=tuple(filter(None, annotations["records"].split(","))),
        key=annotations["key"],
        has_dead_letters=annotations.get("dead-letters") == "true",
        text=text,
    )


def plan(run: RunFile, cluster: str = "streamrl") -> list[Topic]:
    """All topics of a run, sorted by kind. `cluster` is the name of Strimzi's Kafka resource."""
    templates = kinds()
    sources = [
        topic
        for kind in templates.values()
        if kind.has_dead_letters
        for topic in _instances(kind, run, [])
    ]
    return [
        _topic(kind, of, run, cluster)
        for kind in templates.values()
        for of in _names(kind, run, sources)
    ]


def _instances(kind: Kind, run: RunFile, sources: list[str]) -> list[str]:
    """The names of a kind's topics, without the run."""
    return [f"{kind.name}.{name}" if name else kind.name for name in _names(kind, run, sources)]


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
                return list(run.session_envs)
            return list(run.envs)
        case "part":
            roles = [r for r in topology.ROLES if r.has_journal and r.is_needed(run)]
            return [part.identity for role in roles for part in role.parts(run)]
        case "topic":
            return sources


def _topic(kind: Kind, of: str, run: RunFile, cluster: str) -> Topic:
    wanted = run.topics
    values = {
        kind.per: of,
        "run": run.run,
        "cluster": cluster,
        "writers": ",".join(role.room for role in topology.writers(kind.name)),
        "readers": ",".join(role.room for role in topology.readers(kind.name)),
        "partitions": wanted.partitions,
        "replicas": wanted.replicas,
        # Writes go on while one replica is down, and each acknowledged record is on the others.
        "min_insync_replicas": max(1, wanted.replicas - 1),
        "retention_ms": round(wanted.retention_hours * 3_600_000),
    }
    manifest = yaml.safe_load(Template(kind.text).substitute(values))
    config = manifest["spec"]["config"]
    # A topic without a time of retention is a part's state, or is needed to read the whole run. The
    # run file must not make the broker delete records from it.
    may_delete = config.get("retention.ms", -1) != -1
    for name, value in wanted.config.items():
        if may_delete or not name.startswith(DELETING):
            config[name] = value
    manifest["spec"]["config"] = {name: str(value) for name, value in config.items()}
    return Topic(manifest["metadata"]["name"], kind, manifest)


def recorded(run: RunFile, partitions: Mapping[str, int]) -> list[Topic]:
    """The topics of a recorded run, and those that its run file plans besides.

    `partitions` has the recorded topics without the run's name, and their numbers of partitions.
    Raises ConfigError for a topic of an unknown kind.
    """
    templates = kinds()
    planned = {topic.name: topic for topic in plan(run)}
    for name, count in partitions.items():
        kind, _, of = name.partition(".")
        if kind not in templates:
            raise ConfigError(
                f"topic {name} is of no kind that streamrl knows: {', '.join(templates)}"
            )
        # A topic of an env that the run file no longer has is not planned.
        topic = planned.get(f"{run.run}.{name}") or _topic(templates[kind], of, run, "streamrl")
        spec = {**topic.manifest["spec"], "partitions": count}
        planned[topic.name] = replace(topic, manifest={**topic.manifest, "spec": spec})
    return list(planned.values())


def check_for_kubernetes(run: RunFile) -> None:
    """Raise ConfigError for an env whose name is too long for Kubernetes to start its pods.

    Kafka accepts every name that a run file may have.
    """
    for name in run.envs:
        if len(f"env-{name}") > STATEFUL_SET_CHARS:
            longest = STATEFUL_SET_CHARS - len("env-")
            raise ConfigError(
                f"envs.{name}: a name of {len(name)} characters is too long for Kubernetes, which"
                f" labels the pods of the StatefulSet env-{name} with it; take one of at most"
                f" {longest}"
            )


def render(run: RunFile, cluster: str = "streamrl") -> str:
    """The run's KafkaTopics as YAML for `kubectl apply -f -`.

    Strimzi deletes a topic when its manifest is deleted, so each manifest has the annotations that
    keep it. Raises the ConfigError of `check_for_kubernetes`.
    """
    check_for_kubernetes(run)
    manifests = [dict(topic.manifest) for topic in plan(run, cluster)]
    for manifest in manifests:
        metadata = manifest["metadata"]
        annotations = {**metadata["annotations"], **KEPT}
        manifest["metadata"] = {**metadata, "annotations": annotations}
    return yaml.safe_dump_all(manifests, sort_keys=False, explicit_start=True)


# ---- the cluster, and how it becomes as planned --------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One difference between a cluster and the plan."""

    topic: Topic
    what: str  # "create", "partitions", "replicas", or the name of a setting
    old: str = ""
    new: str = ""

    def __str__(self) -> str:
        if self.what == "create":
            return (
                f"+ {self.topic.name}  ({self.topic.partitions} partitions, {self.topic.replicas}"
                " replicas)"
            )
        return f"~ {self.topic.name}  {self.what}: {self.old} -> {self.new}"


def diff(run: RunFile, settings: Mapping[str, Any]) -> list[Change]:
    """What `apply` would change on the cluster, which is not changed.

    `settings` are librdkafka's. Topics of the run that the plan does not have are left alone: they
    belong to an env that was removed, and hold its history. Raises BrokerUnreachable.
    """
    return _diff(_Cluster(settings), plan(run))


def apply(run: RunFile, settings: Mapping[str, Any]) -> list[Change]:
    """Create and change topics as planned. Returns the changes; a second call returns none.

    Raises ConfigError, and changes nothing, if the number of replicas differs, or if the number of
    partitions would shrink or would change on a topic that has data.
    """
    cluster = _Cluster(settings)
    changes = _diff(cluster, plan(run))
    for change in changes:
        if change.what in ("partitions", "replicas"):
            _check_allowed(cluster, change)
    cluster.create([change.topic for change in changes if change.what == "create"])
    cluster.grow([change.topic for change in changes if change.what == "partitions"])
    cluster.configure(
        [change for change in changes if change.what not in ("create", "partitions", "replicas")]
    )
    return changes


def create(run: RunFile, settings: Mapping[str, Any], partitions: Mapping[str, int]) -> None:
    """Create all topics of a recorded run (see `recorded`), or none of them if that fails.

    Raises ConfigError, and changes nothing, if the cluster has topics of a run of that name.
    """
    cluster = _Cluster(settings)
    wanted = recorded(run, partitions)
    existing = sorted(name for name in cluster.partitions() if name.startswith(f"{run.run}."))
    if existing:
        raise ConfigError(
            f"{cluster.address} has topics of a run {run.run!r} already ({existing[0]}, ...); take"
            " another name with --as"
        )
    try:
        cluster.create(wanted)
    except BaseException:
        with contextlib.suppress(StreamrlError):  # The first error says more than this one would.
            cluster.delete([topic.name for topic in wanted])
        raise


def add(run: RunFile, settings: Mapping[str, Any], name: str) -> None:
    """Create one topic that a run's file does not plan, unless it is there. `name` is its name
    without the run.
    """
    cluster = _Cluster(settings)
    wanted = f"{run.run}.{name}"
    if wanted not in cluster.partitions():
        planned = recorded(run, {name: run.topics.partitions})
        cluster.create([topic for topic in planned if topic.name == wanted])


def delete(run: RunFile, settings: Mapping[str, Any]) -> list[str]:
    """Delete all topics of the run and their records. Returns the names of the topics."""
    cluster = _Cluster(settings)
    names = [name for name in cluster.partitions() if name.startswith(f"{run.run}.")]
    cluster.delete(names)
    return names


def _diff(cluster: _Cluster, topics: list[Topic]) -> list[Change]:
    existing = cluster.partitions()
    missing = [topic for topic in topics if topic.name not in existing]
    present = [topic for topic in topics if topic.name in existing]
    configs = cluster.configs(present)
    changes = [Change(topic, "create") for topic in missing]
    for topic in present:
        changes += _differences(topic, *existing[topic.name], configs[topic.name])
    return changes


def _differences(
    topic: Topic, partitions: int, replicas: int, config: Mapping[str, str]
) -> Iterator[Change]:
    if partitions != topic.partitions:
        yield Change(topic, "partitions", str(partitions), str(topic.partitions))
    if replicas != topic.replicas:
        yield Change(topic, "replicas", str(replicas), str(topic.replicas))
    for name, value in topic.config.items():
        if config.get(name) != value:
            yield Change(topic, name, config.get(name, "unset"), value)


def _check_allowed(cluster: _Cluster, change: Change) -> None:
    """Raise ConfigError for a change of partitions or replicas that cannot be made."""
    name = change.topic.name
    if change.what == "replicas":
        what = f"topics.replicas: {change.old} there, {change.new} in the run file"
        why = "set it back, or move the copies with Kafka's own tools"
    elif int(change.new) < int(change.old):
        what = f"topics.partitions: {change.old} there, {change.new} in the run file"
        why = "Kafka takes none away; set it back, or use a new run name"
    elif cluster.has_data(name, int(change.old)):
        what = f"topics.partitions: {change.old} there with data, {change.new} in the run file"
        why = (
            "they are fixed once a run has data, so that no group splits; set it back, or use a new"
            " run name"
        )
    else:
        return
    raise ConfigError(f"topic {name}: {what}: {why}")


class _Cluster:
    """The calls of Kafka's admin API that are needed here. Each is retried while a broker starts or
    a leader moves.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.address = str(settings.get("bootstrap.servers"))
        self._settings = settings
        self._admin = Admin(settings)

    def partitions(self) -> dict[str, tuple[int, int]]:
        """The name of every topic, and its numbers of partitions and replicas."""
        counts: dict[str, tuple[int, int]] = {}
        for name, topic in self._visible_topics().items():
            replicas = max((len(p.replicas) for p in topic.partitions.values()), default=0)
            counts[name] = (len(topic.partitions), replicas)
        return counts

    def configs(self, topics: list[Topic]) -> dict[str, dict[str, str]]:
        """All settings of each topic, by its name."""
        if not topics:
            return {}

        def describe() -> dict[str, dict[str, str]]:
            futures = self._admin.describe_configs(
                [ConfigResource(ResourceType.TOPIC, t.name) for t in topics],
                request_timeout=CALL_TIMEOUT_S,
            )
            return {
                resource.name: {name: str(entry.value) for name, entry in future.result().items()}
                for resource, future in futures.items()
            }

        return self._retry(describe)

    def has_data(self, name: str, partitions: int) -> bool:
        """Whether anything was ever written to the topic."""

        def any_offset() -> bool:
            ends: Any = {TopicPartition(name, p): OffsetSpec.latest() for p in range(partitions)}
            futures = self._admin.list_offsets(ends, request_timeout=CALL_TIMEOUT_S)
            return any(future.result().offset > 0 for future in futures.values())

        return self._retry(any_offset)

    def create(self, topics: list[Topic]) -> None:
        """Create topics, and wait until each can be written to."""
        if not topics:
            return

        def request(portion: list[Topic]) -> None:
            new = [NewTopic(t.name, t.partitions, t.replicas, config=t.config) for t in portion]
            self._wait_for_all(
                self._admin.create_topics(new, request_timeout=CALL_TIMEOUT_S),
                done_already=KafkaError.TOPIC_ALREADY_EXISTS,
            )

        for portion in requests(topics):
            self._retry(partial(request, portion))
        self._wait_until(partial(_have_leaders, topics))

    def grow(self, topics: list[Topic]) -> None:
        """Add partitions up to the planned number, and wait until each can be written to."""
        if not topics:
            return
        wanted = [NewPartitions(t.name, t.partitions) for t in topics]
        self._retry(lambda: self._wait_for_all(self._admin.create_partitions(wanted)))
        self._wait_until(partial(_have_leaders, topics))

    def configure(self, changes: list[Change]) -> None:
        """Set single settings of topics. Settings that are not named keep their values."""
        if not changes:
            return
        entries: dict[str, list[ConfigEntry]] = {}
        for change in changes:
            entries.setdefault(change.topic.name, []).append(
                ConfigEntry(change.what, change.new, incremental_operation=AlterConfigOpType.SET)
            )
        resources = [
            ConfigResource(ResourceType.TOPIC, name, incremental_configs=found)
            for name, found in entries.items()
        ]
        self._retry(
            lambda: self._wait_for_all(
                self._admin.incremental_alter_configs(resources, request_timeout=CALL_TIMEOUT_S)
            )
        )

    def delete(self, names: list[str]) -> None:
        """Delete topics, and wait until they are gone."""
        if not names:
            return

        def request() -> None:
            self._wait_for_all(
                self._admin.delete_topics(names, request_timeout=CALL_TIMEOUT_S),
                done_already=KafkaError.UNKNOWN_TOPIC_OR_PART,
            )

        self._retry(request)
        self._wait_until(lambda existing: not set(names) & existing.keys())

    def _wait_for_all(self, futures: Mapping[Any, Any], done_already: int | None = None) -> None:
        """Wait for all results of a request.

        `done_already` is the error by which the cluster says that there is nothing left to do.
        Raises ConfigError for a request that the cluster refuses, with its reason.
        """
        for name, future in futures.items():
            try:
                future.result()
            except KafkaException as exception:
                error = exception.args[0]
                if error.code() in _REFUSED:
                    raise ConfigError(
                        f"topic {getattr(name, 'name', name)}: {self.address} refuses:"
                        f" {error.str()} (`topics` in the run file)"
                    ) from None
                if error.code() != done_already:
                    raise

    def _wait_until(self, done: Callable[[Mapping[str, Any]], bool]) -> None:
        """Wait until the metadata of the topics shows that a request has taken effect."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while not done(self._visible_topics()):
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{self.address} has accepted changes of topics but not carried them out for"
                    f" {SETTLE_LIMIT_S:.0f} s; see its log"
                )
            time.sleep(0.05)

    def _visible_topics(self) -> Mapping[str, Any]:
        return self._admin.visible_topics(CALL_TIMEOUT_S / 2)

    def _retry(self, call: Callable[[], T]) -> T:
        try:
            return call_with_retries(call, self.address)
        except AccessDenied:
            raise access_denied(self._settings, "make, describe or change topics") from None


def requests(topics: list[Topic]) -> Iterator[list[Topic]]:
    """Split topics into portions that one request can create.

    The controller writes a metadata record for each topic, partition and setting, and at most
    10,000 of them for one request.
    """
    portion = list[Topic]()
    records = 0
    for topic in topics:
        wanted = 1 + topic.partitions + len(topic.config)
        if portion and records + wanted > REQUEST_RECORDS:
            yield portion
            portion = []
            records = 0
        portion.append(topic)
        records += wanted
    if portion:
        yield portion


def _have_leaders(wanted: list[Topic], existing: Mapping[str, Any]) -> bool:
    for topic in wanted:
        if topic.name not in existing:
            return False
        partitions = existing[topic.name].partitions.values()
        if sum(partition.leader >= 0 for partition in partitions) != topic.partitions:
            return False
    return True


_REFUSED = {
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_REPLICA_ASSIGNMENT,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
}
