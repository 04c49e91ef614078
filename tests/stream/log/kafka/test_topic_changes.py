"""How a cluster's topics become those of a run."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.run_file import parse
from streamrl.stream.log import topics
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Message, end_offset
from streamrl.system.errors import BrokerUnreachable, ConfigError
from tests.stream.log.test_topics import run_file
from tests.support.waiting import until


def test_topics_of_which_some_cannot_be_made_are_all_taken_back(monkeypatch: pytest.MonkeyPatch):
    class Cluster:
        """One that makes the first topic and refuses the others."""

        address = "nowhere"
        there = dict[str, tuple[int, int]]()  # noqa: RUF012

        def __init__(self, settings: object) -> None: ...

        def partitions(self) -> dict[str, tuple[int, int]]:
            return self.there

        def default_replicas(self) -> int:
            return 1

        def create(self, wanted: list[topics.Topic]) -> None:
            self.there[wanted[0].name] = (1, 1)
            raise ConfigError("too many")

        def delete(self, names: list[str]) -> None:
            for name in names:
                self.there.pop(name, None)

    monkeypatch.setattr(topic_changes, "TopicAdmin", Cluster)
    for _ in range(2):  # the second time nothing of the first is in the way
        with pytest.raises(ConfigError, match="too many"):
            topic_changes.create(run_file(), {}, {})
    assert Cluster.there == {}


def test_where_no_copies_are_set_a_topic_keeps_those_that_it_has(monkeypatch: pytest.MonkeyPatch):
    """It was made on one broker, of what are three now. Others get three copies."""
    run = run_file()
    old = next(topic for topic in topics.plan(run) if topic.kind.name == "batches")

    class Cluster:
        def __init__(self, settings: object) -> None: ...

        def partitions(self) -> dict[str, tuple[int, int]]:
            return {old.name: (old.partitions, old.replicas)}

        def default_replicas(self) -> int:
            return topics.default_replicas(brokers=3)

        def configs(self, present: list[topics.Topic]) -> dict[str, dict[str, str]]:
            return {old.name: old.config}

    monkeypatch.setattr(topic_changes, "TopicAdmin", Cluster)
    changes = topic_changes.diff(run, {})
    assert {change.what for change in changes} == {"create"}
    assert old.name not in {change.topic.name for change in changes}
    assert {change.topic.replicas for change in changes} == {3}
    assert {change.topic.config["min.insync.replicas"] for change in changes} == {"2"}
    set_to_three = topic_changes.diff(run_file(replicas=3), {})
    assert ("replicas", "1", "3") in {(c.what, c.old, c.new) for c in set_to_three}


@pytest.fixture
def cluster(broker: str) -> dict[str, Any]:
    return {"bootstrap.servers": broker}


def test_apply_makes_them_and_a_second_time_changes_nothing(cluster: dict[str, Any], run_name: str):
    run = run_file(run_name, partitions=2)
    planned = topics.plan(run)
    assert [(change.topic.name, change.what) for change in topic_changes.diff(run, cluster)] == [
        (topic.name, "create") for topic in planned
    ]
    assert len(topic_changes.apply(run, cluster)) == len(planned)
    assert KafkaLog(cluster, run_name).topics() == {
        topic.name.removeprefix(f"{run_name}."): topic.partitions for topic in planned
    }
    assert topic_changes.diff(run, cluster) == []
    assert topic_changes.apply(run, cluster) == []
    assert topic_changes.delete(run, cluster)
    assert len(topic_changes.diff(run, cluster)) == len(planned)


def test_settings_and_new_replicas_of_an_env_are_applied_to_a_run_that_exists(
    cluster: dict[str, Any], run_name: str
):
    topic_changes.apply(run_file(run_name), cluster)
    more = parse(
        {
            "run": run_name,
            "envs": {"a": {"replicas": 3}},
            "topics": {"retention_hours": 1, "config": {"compression.type": "zstd"}},
        }
    )
    changes = topic_changes.apply(more, cluster)
    assert f"+ {run_name}.journal.env-a-2  (1 partitions, 1 replicas)" in map(str, changes)
    assert f"~ {run_name}.fates  retention.ms: 604800000 -> 3600000" in map(str, changes)
    assert f"~ {run_name}.servers  compression.type: producer -> zstd" in map(str, changes)
    assert topic_changes.diff(more, cluster) == []
    assert "rollouts.b" in KafkaLog(cluster, run_name).topics(), (
        "what the plan no longer has is the run's past, and stays"
    )


def test_partitions_change_only_before_there_is_data(cluster: dict[str, Any], run_name: str):
    topic_changes.apply(run_file(run_name, partitions=1), cluster)
    topic_changes.apply(run_file(run_name, partitions=2), cluster)
    log = KafkaLog(cluster, run_name)
    assert log.topics()["rollouts.a"] == 2

    with pytest.raises(
        ConfigError,
        match=r"groups.a: topics.partitions: 2 there, 1 in the run file: .* use a new run name",
    ):
        topic_changes.apply(run_file(run_name, partitions=1), cluster)

    writer = log.producer()
    writer.send(Message("rollouts.a", b"key", b"value"))
    writer.flush()
    writer.close()
    with pytest.raises(
        ConfigError,
        match=(
            r"rollouts.a: topics.partitions: 2 there with data, 3 in the run file: they are fixed"
            r" .* use a new run name"
        ),
    ):
        topic_changes.apply(run_file(run_name, partitions=3, retention_hours=1), cluster)
    assert log.topics()["rollouts.b"] == 2, "a refused change changes nothing"
    assert topic_changes.diff(run_file(run_name, partitions=2), cluster) == []


def test_what_the_cluster_cannot_do_is_said_with_the_setting(
    cluster: dict[str, Any], run_name: str
):
    with pytest.raises(
        ConfigError, match=r"replication factor of 2 cannot be reached.*`topics` in the run file"
    ):
        topic_changes.apply(run_file(run_name, replicas=2), cluster)
    with pytest.raises(ConfigError, match=r"no.such.setting"):
        topic_changes.apply(run_file(run_name, config={"no.such.setting": "1"}), cluster)
    topic_changes.apply(run_file(run_name), cluster)
    with pytest.raises(
        ConfigError, match=r"topics.replicas: 1 there, 3 in the run file: set it back"
    ):
        topic_changes.apply(run_file(run_name, replicas=3), cluster)


def test_two_runs_on_one_broker_do_not_meet(cluster: dict[str, Any], run_name: str):
    """Not even when the name of one begins like the other's."""
    one = run_file(run_name)
    other = run_file(f"{run_name}-b")
    topic_changes.apply(one, cluster)
    topic_changes.apply(other, cluster)
    first = KafkaLog(cluster, one.run)
    second = KafkaLog(cluster, other.run)
    assert first.topics() == second.topics()
    writer = first.writer("buffer")
    writer.commit([Message("batches", b"0", b"of one")])
    writer.close()
    until(
        lambda: end_offset(first, "batches", 0) > 0
    )  # a transaction shows a moment after its commit
    assert end_offset(second, "batches", 0) == 0
    topic_changes.delete(one, cluster)
    assert topic_changes.diff(other, cluster) == []


def test_no_broker_is_said_in_a_line_with_the_address():
    with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1 .*streamrl broker"):
        topic_changes.apply(run_file(), {"bootstrap.servers": "127.0.0.1:1"})
