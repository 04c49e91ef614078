"""Topics as code: `topics/*.yaml` are templates, one a kind; a run's topics follow from its run
file. For kubectl (Strimzi), or for `apply`.

What a topic carries, by which key, who writes it and who reads it stands in its template, for
people in comments, for programs in annotations. Parts name topics without the run
(`rollouts.copy-digits`); on the broker each is `<run>.<topic>`, so two runs never meet.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin passes its names on without saying so

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
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Where
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

# settings by which a broker deletes records
DELETING = ("retention.", "local.retention.", "cleanup.policy")
CALL_TIMEOUT_S = 10.0
REQUEST_RECORDS = 4_000  # of a request to make topics
SETTLE_LIMIT_S = 30.0  # until a new topic has leaders, or a deleted one is gone


# ---- what there should be ------------------------------------------------------------------------
# of a StatefulSet's name: a label of its pods, 63 at most, has it and 11 characters more
STATEFUL_SET_CHARS = 52
# a topic outlives its manifest
KEPT = {
    "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
    "helm.sh/resource-policy": "keep",
}


@dataclass(frozen=True)
class Kind:
    """A template of topics/."""

    name: str
    per: Literal["run", "env", "part", "topic"]
    records: tuple[str, ...]  # schemas it carries, names in records.RECORDS; empty: anything
    key: str
    has_dead_letters: bool
    text: str


@dataclass(frozen=True)
class Topic:
    """A topic as a run wants it."""

    name: str  # on the broker: with the run
    kind: Kind
    manifest: Mapping[str, Any]  # the KafkaTopic

    @property
    def partitions(self) -> int:
        return self.manifest["spec"]["partitions"]

    @property
    def replicas(self) -> int:
        return self.manifest["spec"]["replicas"]

    @property
    def config(self) -> dict[str, str]:
        return self.manifest["spec"]["config"]


def kinds() -> dict[str, Kind]:
    """The templates, by name."""
    here = Path(__file__).parents[1]
    # installed; working tree
    directory = next(
        place for place in (here / "topic_templates", here.parent / "topics") if place.is_dir()
    )
    return {path.stem: _kind(path) for path in sorted(directory.glob("*.yaml"))}


def _kind(path: Path) -> Kind:
    text = path.read_text()
    notes: dict[str, Any] = {
        name.removeprefix("streamrl/"): note
        for name, note in yaml.safe_load(text)["metadata"]["annotations"].items()
    }
    return Kind(
        path.stem,
        notes["per"],
        tuple(filter(None, notes["records"].split(","))),
        notes["key"],
        notes.get("dead-letters") == "true",
        text,
    )


def plan(run: RunFile, cluster: str = "streamrl") -> list[Topic]:
    """Every topic of a run, by kind. `cluster` is the name of Strimzi's Kafka, for kubectl."""
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
    """Topics of a kind, without the run."""
    return [f"{kind.name}.{name}" if name else kind.name for name in _names(kind, run, sources)]


def _names(kind: Kind, run: RunFile, sources: list[str]) -> list[str]:
    """What the topics of a kind are named after."""
    match kind.per:
        case "run":
            return [""]
        case "env":
            filtered = kind.name == topology.VISITS
            return [name for name, env in run.envs.items() if env.pass_rate or not filtered]
        case "part":
            roles = [role for role in topology.ROLES if role.has_journal]
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
        # one copy may be away, and nothing acknowledged is lost with another
        "min_insync_replicas": max(1, wanted.replicas - 1),
        "retention_ms": round(wanted.retention_hours * 3_600_000),
    }
    manifest = yaml.safe_load(Template(kind.text).substitute(values))
    own = manifest["spec"]["config"]
    # others are a part's memory, or what the whole run is known by: nothing of them may be deleted
    bounded = own.get("retention.ms", -1) != -1
    more = {
        name: value
        for name, value in wanted.config.items()
        if bounded or not name.startswith(DELETING)
    }
    manifest["spec"]["config"] = {name: str(value) for name, value in {**own, **more}.items()}
    return Topic(manifest["metadata"]["name"], kind, manifest)


def recorded(run: RunFile, partitions: Mapping[str, int]) -> list[Topic]:
    """The topics of a recorded run, whose names without the run and numbers of partitions are
    given, and what else the run file plans.

    Raises ConfigError for a topic of no kind.
    """
    templates = kinds()
    made = {topic.name: topic for topic in plan(run)}
    for name, count in partitions.items():
        kind, _, of = name.partition(".")
        if kind not in templates:
            raise ConfigError(
                f"topic {name} is of no kind that streamrl knows: {', '.join(templates)}"
            )
        # else: of an env that has been taken out
        topic = made.get(f"{run.run}.{name}") or _topic(templates[kind], of, run, "streamrl")
        made[topic.name] = replace(
            topic,
            manifest={**topic.manifest, "spec": {**topic.manifest["spec"], "partitions": count}},
        )
    return list(made.values())


def check_for_kubernetes(run: RunFile) -> None:
    """Raises ConfigError for an env whose pods Kubernetes would not start. Kafka takes every name
    that a run file may have.
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
    """The run's KafkaTopics for `kubectl apply -f -`. Strimzi deletes a topic with its manifest, so
    what prunes manifests is told to leave these. Raises ConfigError, as `check_for_kubernetes`.
    """
    check_for_kubernetes(run)
    manifests = [dict(topic.manifest) for topic in plan(run, cluster)]
    for manifest in manifests:
        manifest["metadata"] = {
            **manifest["metadata"],
            "annotations": {**manifest["metadata"]["annotations"], **KEPT},
        }
    return yaml.safe_dump_all(manifests, sort_keys=False, explicit_start=True)


# ---- what there is, and the way there ------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One thing in which a cluster differs from the plan."""

    topic: Topic
    what: str  # "create", "partitions", or the name of a setting
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
    """What `apply` would do on the cluster that librdkafka's `settings` reach. Raises
    BrokerUnreachable; changes nothing.

    Topics of the run that the plan does not have (of an env that was taken out) stay as they are:
    they are its past.
    """
    return _diff(_Cluster(settings), plan(run))


def apply(run: RunFile, settings: Mapping[str, Any]) -> list[Change]:
    """Make the cluster as planned and return what was changed: nothing, the second time.

    Raises ConfigError, before anything is changed, when partitions differ on a topic that has data
    or would become fewer, or replicas differ.
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
    """Make the topics of a recorded run (`recorded`), or none of them where that fails.

    Raises ConfigError, and changes nothing, when the cluster has topics of a run of that name.
    """
    cluster = _Cluster(settings)
    wanted = recorded(run, partitions)
    if there := sorted(name for name in cluster.partitions() if name.startswith(f"{run.run}.")):
        raise ConfigError(
            f"{cluster.address} has topics of a run {run.run!r} already ({there[0]}, ...); take"
            " another name with --as"
        )
    try:
        cluster.create(wanted)
    except BaseException:
        with contextlib.suppress(StreamrlError):  # the first error says more
            cluster.delete([topic.name for topic in wanted])
        raise


def delete(run: RunFile, settings: Mapping[str, Any]) -> list[str]:
    """Delete every topic of the run, with all it holds. Returns their names."""
    cluster = _Cluster(settings)
    names = [name for name in cluster.partitions() if name.startswith(f"{run.run}.")]
    cluster.delete(names)
    return names


def _diff(cluster: _Cluster, topics: list[Topic]) -> list[Change]:
    there = cluster.partitions()
    missing = [Change(topic, "create") for topic in topics if topic.name not in there]
    present = [topic for topic in topics if topic.name in there]
    configs = cluster.configs(present)
    return missing + [
        change
        for topic in present
        for change in _differences(topic, *there[topic.name], configs[topic.name])
    ]


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
    """The few questions and orders for a cluster's administration, each made again while a broker
    starts or moves.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.address = str(settings.get("bootstrap.servers"))
        self._settings = settings
        self._admin = Admin(settings)

    def partitions(self) -> dict[str, tuple[int, int]]:
        """(partitions, replicas) of every topic."""
        return {
            name: (
                len(t.partitions),
                max((len(p.replicas) for p in t.partitions.values()), default=0),
            )
            for name, t in self._topics().items()
        }

    def configs(self, topics: list[Topic]) -> dict[str, dict[str, str]]:
        """All settings of each topic, by its name."""

        def ask() -> dict[str, dict[str, str]]:
            futures = self._admin.describe_configs(
                [ConfigResource(ResourceType.TOPIC, t.name) for t in topics],
                request_timeout=CALL_TIMEOUT_S,
            )
            return {
                resource.name: {name: str(entry.value) for name, entry in future.result().items()}
                for resource, future in futures.items()
            }

        return self._again(ask) if topics else {}

    def has_data(self, name: str, partitions: int) -> bool:
        """Was ever anything written to it?"""

        def ask() -> bool:
            ends: Any = {Where(name, p): OffsetSpec.latest() for p in range(partitions)}
            futures = self._admin.list_offsets(ends, request_timeout=CALL_TIMEOUT_S)
            return any(future.result().offset > 0 for future in futures.values())

        return self._again(ask)

    def create(self, topics: list[Topic]) -> None:
        """Make them, and wait until each can be written to."""
        if not topics:
            return

        def order(some: list[Topic]) -> None:
            new = [NewTopic(t.name, t.partitions, t.replicas, config=t.config) for t in some]
            self._carry_out(
                self._admin.create_topics(new, request_timeout=CALL_TIMEOUT_S),
                unless=KafkaError.TOPIC_ALREADY_EXISTS,
            )

        for some in requests(topics):
            self._again(partial(order, some))
        self._settle(partial(_have_leaders, topics))

    def grow(self, topics: list[Topic]) -> None:
        if topics:
            self._again(
                lambda: self._carry_out(
                    self._admin.create_partitions(
                        [NewPartitions(t.name, t.partitions) for t in topics]
                    )
                )
            )
            self._settle(partial(_have_leaders, topics))

    def configure(self, changes: list[Change]) -> None:
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
        self._again(
            lambda: self._carry_out(
                self._admin.incremental_alter_configs(resources, request_timeout=CALL_TIMEOUT_S)
            )
        )

    def delete(self, names: list[str]) -> None:
        def order() -> None:
            self._carry_out(
                self._admin.delete_topics(names, request_timeout=CALL_TIMEOUT_S),
                unless=KafkaError.UNKNOWN_TOPIC_OR_PART,
            )

        if names:
            self._again(order)
            self._settle(lambda there: not set(names) & there.keys())

    def _carry_out(self, futures: Mapping[Any, Any], unless: int | None = None) -> None:
        """Wait for all; what the cluster refuses is a ConfigError with its reason. `unless`: an
        error that says it is done already.
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
                if error.code() != unless:
                    raise

    def _settle(self, done: Callable[[Mapping[str, Any]], bool]) -> None:
        """Wait until the cluster's view of its topics shows that an order has been carried out
        everywhere.
        """
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while not done(self._topics()):
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{self.address} has accepted changes of topics but not carried them out for"
                    f" {SETTLE_LIMIT_S:.0f} s; see its log"
                )
            time.sleep(0.05)

    def _topics(self) -> Mapping[str, Any]:
        return self._admin.visible_topics(CALL_TIMEOUT_S / 2)

    def _again(self, call: Callable[[], T]) -> T:
        try:
            return call_with_retries(call, self.address)
        except AccessDenied:
            raise access_denied(self._settings, "make, describe or change topics") from None


def requests(topics: list[Topic]) -> Iterator[list[Topic]]:
    """The topics, cut into lists that a controller makes in one go: it writes a record for each
    topic, partition and setting, 10,000 at most.
    """
    some = list[Topic]()
    records = 0
    for topic in topics:
        wanted = 1 + topic.partitions + len(topic.config)
        if some and records + wanted > REQUEST_RECORDS:
            yield some
            some = []
            records = 0
        some.append(topic)
        records += wanted
    if some:
        yield some


def _have_leaders(wanted: list[Topic], there: Mapping[str, Any]) -> bool:
    return all(
        t.name in there
        and len([p for p in there[t.name].partitions.values() if p.leader >= 0]) == t.partitions
        for t in wanted
    )


_REFUSED = {
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_REPLICA_ASSIGNMENT,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
}
