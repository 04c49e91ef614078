"""How a cluster's topics become those of a run: what differs from the plan, and the changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.config.run_file import RunFile
from streamrl.stream.log.kafka.topics import TopicAdmin
from streamrl.stream.log.topics import Topic, plan, topics_of_recorded_run
from streamrl.system.errors import ConfigError, StreamrlError


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
    return _diff(TopicAdmin(settings), run)


def apply(run: RunFile, settings: Mapping[str, Any]) -> list[Change]:
    """Create and change topics as planned. Returns the changes; a second call returns none.

    Raises ConfigError, and changes nothing, if the number of replicas differs, or if the number of
    partitions would shrink or would change on a topic that has data.
    """
    cluster = TopicAdmin(settings)
    changes = _diff(cluster, run)
    for change in changes:
        if change.what in ("partitions", "replicas"):
            _check_allowed(cluster, change)
    cluster.create([change.topic for change in changes if change.what == "create"])
    cluster.grow([change.topic for change in changes if change.what == "partitions"])
    values: dict[str, dict[str, str]] = {}
    for change in changes:
        if change.what not in ("create", "partitions", "replicas"):
            values.setdefault(change.topic.name, {})[change.what] = change.new
    cluster.configure(values)
    return changes


def create(run: RunFile, settings: Mapping[str, Any], partitions: Mapping[str, int]) -> None:
    """Create all topics of a recorded run, or none of them if that fails.

    `partitions` is that of `topics_of_recorded_run`. Raises ConfigError, and changes nothing, if
    the cluster has topics of a run of that name.
    """
    cluster = TopicAdmin(settings)
    wanted = topics_of_recorded_run(run, partitions, cluster.default_replicas())
    existing = sorted(name for name in cluster.partitions() if name.startswith(f"{run.run}."))
    if existing:
        raise ConfigError(
            f"{cluster.address} has topics of a run {run.run!r} already ({existing[0]}, ...); take"
            " another name with --as"
        )
    try:
        cluster.create(wanted)
    except BaseException:
        with contextlib.suppress(StreamrlError):  # The first error is clearer.
            cluster.delete([topic.name for topic in wanted])
        raise


def add(run: RunFile, settings: Mapping[str, Any], name: str) -> None:
    """Create one topic that a run's file does not plan, unless it is there. `name` is its name
    without the run.
    """
    cluster = TopicAdmin(settings)
    wanted = f"{run.run}.{name}"
    if wanted not in cluster.partitions():
        partitions = {name: run.topics.partitions}
        planned = topics_of_recorded_run(run, partitions, cluster.default_replicas())
        cluster.create([topic for topic in planned if topic.name == wanted])


def delete(run: RunFile, settings: Mapping[str, Any]) -> list[str]:
    """Delete all topics of the run and their records. Returns the names of the topics."""
    cluster = TopicAdmin(settings)
    names = [name for name in cluster.partitions() if name.startswith(f"{run.run}.")]
    cluster.delete(names)
    return names


def _diff(cluster: TopicAdmin, run: RunFile) -> list[Change]:
    existing = cluster.partitions()
    topics = _planned(run, existing, cluster.default_replicas())
    missing = [topic for topic in topics if topic.name not in existing]
    present = [topic for topic in topics if topic.name in existing]
    configs = cluster.configs(present)
    changes = [Change(topic, "create") for topic in missing]
    for topic in present:
        changes += _differences(topic, *existing[topic.name], configs[topic.name])
    return changes


def _planned(
    run: RunFile, existing: Mapping[str, tuple[int, int]], default_replicas: int
) -> list[Topic]:
    """The topics of the run. Where its file sets no number of replicas, a topic that exists keeps
    the number that it has.
    """
    plans: dict[int, dict[str, Topic]] = {}
    topics: list[Topic] = []
    for name in (topic.name for topic in plan(run)):
        replicas = existing[name][1] if name in existing else default_replicas
        if replicas not in plans:
            plans[replicas] = {topic.name: topic for topic in plan(run, replicas=replicas)}
        topics.append(plans[replicas][name])
    return topics


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


def _check_allowed(cluster: TopicAdmin, change: Change) -> None:
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
