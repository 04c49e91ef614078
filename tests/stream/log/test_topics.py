"""Topics as code: what a run file asks for, by hand; and how a real broker gets there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.stream.log import topics
from streamrl.stream.log.dead_letters import to_dead_letter
from streamrl.stream.log.protocol import Event, Undecodable
from streamrl.stream.records import RECORDS
from streamrl.system.errors import ConfigError

KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def run_file(name: str = "r", **settings: Any) -> RunFile:
    return parse({"run": name, "envs": {"a": {"replicas": 2}, "b": {}}, "topics": settings})


# ---- the plan ------------------------------------------------------------------------------------


def test_a_run_has_these_topics():
    planned = {topic.name.removeprefix("r.") for topic in topics.plan(run_file())}
    expected = {
        *("rollouts.a", "rollouts.b", "groups.a", "groups.b"),
        *(
            "batches",
            "scores",
            "policy-versions",
            "demand",
            "servers",
            "fates",
            "config",
            "metrics",
            "evals",
        ),
        *(
            "journal.buffer",
            "journal.batcher",
            "journal.env-a-0",
            "journal.env-a-1",
            "journal.env-b-0",
        ),
        *(
            "dead-letters.rollouts.a",
            "dead-letters.rollouts.b",
            "dead-letters.groups.a",
            "dead-letters.groups.b",
        ),
        *("dead-letters.batches", "dead-letters.policy-versions"),
    }
    assert planned == expected, (
        f"planned, and not in this list: {sorted(planned - expected)}; in this list, and not"
        f" planned: {sorted(expected - planned)}"
    )
    assert all(topic.name.startswith("r.") for topic in topics.plan(run_file()))


def test_only_envs_that_filter_by_pass_rate_have_visits():
    run = parse({"run": "r", "envs": {"a": {"pass_rate": {"between": [0, 0.9]}}, "b": {}}})
    visits = [topic for topic in topics.plan(run) if topic.kind.name == topology.VISITS]
    assert [topic.name for topic in visits] == ["r.visits.a"] and visits[0].config[
        "cleanup.policy"
    ] == "compact"
    assert topology.visits("a") == "visits.a"
    assert not any(topic.kind.name == topology.VISITS for topic in topics.plan(run_file()))


def test_only_envs_with_sessions_have_turns():
    run = parse({"run": "r", "envs": {"a": {"sessions": {}}, "b": {}}})
    made = {topic.name for topic in topics.plan(run)} - {t.name for t in topics.plan(run_file())}
    assert made == {
        "r.turns.a",
        "r.dead-letters.turns.a",
        "r.journal.assembler",
    }


def test_an_env_that_records_its_turns_has_a_topic_for_them():
    run = parse({"run": "r", "envs": {"a": {"kind": "calculator"}, "b": {}}})
    made = {topic.name for topic in topics.plan(run)} - {t.name for t in topics.plan(run_file())}
    assert made == {"r.turns.a", "r.dead-letters.turns.a"}


def test_model_calls_are_recorded_where_rollouts_may_have_several_turns():
    envs = {
        "calculator": {},
        "guess": {"kind": "guess-number"},
        "mine": {"kind": "mine.py:Mine"},
        "copy-digits": {},
        "once": {"kind": "mine.py:Mine", "max_turns": 1},
        "outside": {"kind": "calculator", "replicas": 0},
    }
    run = parse({"run": "r", "envs": envs})
    assert run.turn_envs == ("calculator", "guess", "mine")
    turns = [topic.name for topic in topics.plan(run) if topic.kind.name == topology.TURNS]
    assert turns == ["r.turns.calculator", "r.turns.guess", "r.turns.mine"]


def test_the_constants_are_the_templates():
    constants = {
        value for name, value in vars(topology).items() if name.isupper() and isinstance(value, str)
    }
    kinds = set(topics.kinds())
    expected = constants - {topology.GENERATION, topology.RESCORER}
    assert kinds == expected, (
        f"topics/ has no template for {sorted(expected - kinds)}; streamrl/config/topology.py has"
        f" no constant for {sorted(kinds - expected)}"
    )
    assert (topology.rollouts("a"), topology.groups("a")) == ("rollouts.a", "groups.a")
    assert topology.journal(topology.env_part("a", 1)) == "journal.env-a-1"
    assert topology.dead_letters(topology.BATCHES) == "dead-letters.batches"


def test_a_kind_has_one_partition_by_design_or_as_many_as_the_run_file_says():
    envs = {"a": {"sessions": {}}}
    planned = topics.plan(parse({"run": "r", "envs": envs, "topics": {"partitions": 3}}))
    many = {topic.kind.name for topic in planned if topic.partitions == 3}
    assert many == set(topology.PARTITIONED) - {topology.REWARDS}  # `streamrl rescore` makes it
    assert all(topic.partitions in (1, 3) for topic in planned)
    assert topology.sole_partition(topology.BATCHES) == ("batches", 0)
    with pytest.raises(ValueError, match="groups.a has as many partitions"):
        topology.sole_partition(topology.groups("a"))


def test_every_record_has_a_topic_and_no_template_names_another():
    carried = [record for kind in topics.kinds().values() for record in kind.records]
    assert set(carried) == set(RECORDS), (
        "topics/*.yaml (`streamrl/stream/records`) and RECORDS differ"
    )


def test_what_is_put_aside_has_a_topic_to_go_to():
    planned = {topic.name for topic in topics.plan(run_file())}
    for topic in ("rollouts.a", "groups.b", "batches", "policy-versions"):
        for output in to_dead_letter(
            Event(topic, 0, 0, "", Undecodable("cause", b"", ())), "cause"
        ):
            assert f"r.{output.topic}" in planned


def test_partitions_and_copies_are_those_of_the_run_file():
    planned = {topic.name: topic for topic in topics.plan(run_file(partitions=4, replicas=3))}
    several = {name for name, topic in planned.items() if topic.partitions != 1}
    assert several == {"r.rollouts.a", "r.rollouts.b", "r.groups.a", "r.groups.b"}
    assert {planned[name].partitions for name in several} == {4}
    assert {topic.replicas for topic in planned.values()} == {3}
    assert {topic.config["min.insync.replicas"] for topic in planned.values()} == {"2"}


def test_what_is_kept_how_long():
    planned = {
        topic.name.removeprefix("r."): topic.config
        for topic in topics.plan(run_file(retention_hours=2.5))
    }
    for_ever = {name for name, settings in planned.items() if settings.get("retention.ms") == "-1"}
    latest_only = {
        name for name, settings in planned.items() if settings["cleanup.policy"] == "compact"
    }
    journals = {name for name in planned if name.startswith("journal.")}
    elsewhere = "; say it in docs/operations.md, Cost of retention, too"
    assert for_ever == journals | {"config", "policy-versions", "evals"}, (
        f"kept for ever{elsewhere}: {sorted(for_ever - journals)}"
    )
    of_envs = {name for name in journals if name.startswith("journal.env-")}
    assert latest_only == {"demand", "servers", *of_envs}, (
        f"compacted{elsewhere}: {sorted(latest_only)}"
    )
    assert {
        settings["retention.ms"]
        for name, settings in planned.items()
        if name not in for_ever | latest_only
    } == {"9000000"}
    largest = 8 * 1024 * 1024
    # a letter has room for what is said of a record that is as large as its topic takes
    for name, topic_settings in planned.items():
        assert int(topic_settings["max.message.bytes"]) == largest + (
            65_536 if name.startswith("dead-letters.") else 0
        )


def test_no_setting_deletes_what_is_kept_for_ever():
    """Retention of bytes on a journal would delete the memory of a part."""
    more = {
        "retention.bytes": "1000000",
        "retention.ms": "60000",
        "cleanup.policy": "delete",
        "segment.bytes": "2000000",
    }
    before = {topic.name: topic.config for topic in topics.plan(run_file())}
    for topic in topics.plan(run_file(config=more)):
        kept = before[topic.name].get("retention.ms", "-1") == "-1"
        assert topic.config == {
            **before[topic.name],
            **({"segment.bytes": "2000000"} if kept else more),
        }, topic.name


def test_settings_of_the_run_file_come_last():
    planned = topics.plan(
        run_file(config={"compression.type": "zstd", "max.message.bytes": "1000"})
    )
    assert {
        (topic.config["compression.type"], topic.config["max.message.bytes"]) for topic in planned
    } == {("zstd", "1000")}


def test_the_longest_names_of_run_and_env_make_names_that_kafka_takes():
    longest = parse({"run": "x" * 62, "envs": {"y" * 62: {}}})
    assert max(len(topic.name) for topic in topics.plan(longest)) <= 249


def test_render_is_what_kubectl_takes():
    run = parse({"run": "x" * 62, "envs": {"y" * 62: {}}, "topics": {"partitions": 2}})
    manifests = list(yaml.safe_load_all(topics.render(run, cluster="kafka")))
    assert [manifest["metadata"]["name"] for manifest in manifests] == [
        topic.name for topic in topics.plan(run)
    ]
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        assert KUBERNETES_NAME.fullmatch(name)
        assert len(name) <= 249, "Kafka takes no longer one"
        assert (manifest["apiVersion"], manifest["kind"]) == ("kafka.strimzi.io/v1", "KafkaTopic")
        assert manifest["metadata"]["labels"] == {
            "strimzi.io/cluster": "kafka",
            "streamrl/run": run.run,
        }
        assert all(isinstance(note, str) for note in manifest["metadata"]["annotations"].values())
        assert set(manifest["spec"]) == {"partitions", "replicas", "config"}
        assert isinstance(manifest["spec"]["partitions"], int)
        assert "$" not in str(manifest)


def test_what_is_read_months_later_may_be_in_tiered_storage():
    run = parse(
        {
            "run": "r",
            "envs": {"a": {"sessions": {}}},
            "topics": {"retention_hours": 2160, "config": {"local.retention.ms": "1"}},
        }
    )
    manifests = list(yaml.safe_load_all(topics.render(run, local_hours=1.5)))
    tiered = {
        manifest["metadata"]["name"]: manifest["spec"]["config"]["local.retention.ms"]
        for manifest in manifests
        if manifest["spec"]["config"].get("remote.storage.enable") == "true"
    }
    names = ("r.rollouts.a", "r.turns.a", "r.groups.a", "r.batches")
    assert tiered == dict.fromkeys(names, "5400000")
    for manifest in manifests:
        if manifest["metadata"]["name"] in tiered:
            assert manifest["spec"]["config"]["retention.ms"] == "7776000000"
            assert manifest["spec"]["config"]["cleanup.policy"] == "delete"


def test_brokers_keep_no_record_for_longer_than_the_remote_storage():
    with pytest.raises(
        ConfigError, match=r"--tiered 2: .* topics.retention_hours \(1\); raise that"
    ):
        topics.render(run_file(retention_hours=1), local_hours=2)
