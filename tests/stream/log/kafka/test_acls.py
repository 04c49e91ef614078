"""Who may do what: the rules by hand, and a broker that keeps them, over TLS, each role with its
own password.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any, NamedTuple

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.recordings.rescore import RewardScorer, rescore
from streamrl.stream.log import topics
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import acls, topic_changes
from streamrl.stream.log.kafka.acls import Rule
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.writer import KafkaWriter
from streamrl.stream.log.protocol import (
    Message,
    Output,
    beginning_offset,
    end_offset,
    partitions_of,
)
from streamrl.system.errors import AccessDenied, BrokerUnreachable, ConfigError
from tests.support.build import rollout
from tests.support.secure import Secure, make_certificates
from tests.support.waiting import until

ENVS = {"a": {"replicas": 2}, "out": {"replicas": 0}}
DEAD = "dead-letters"
# by hand, from the picture in docs/architecture.md: what each reads, what it writes, and what it
# does both to; all else is refused
PARTS = {
    "env-a": ("demand servers", "rollouts.a metrics", "journal.env-a-0 journal.env-a-1"),
    "env-out": ("demand servers", "rollouts.out metrics", ""),
    "buffer": (
        "rollouts.a rollouts.out policy-versions",
        (
            f"groups.a groups.out fates metrics {DEAD}.rollouts.a {DEAD}.rollouts.out"
            f" {DEAD}.policy-versions"
        ),
        "journal.buffer",
    ),
    "batcher": (
        "groups.a groups.out policy-versions rollouts.a rollouts.out",
        f"batches demand fates metrics {DEAD}.groups.a {DEAD}.groups.out {DEAD}.policy-versions",
        "journal.batcher",
    ),
    "scorer": ("batches policy-versions", "metrics", "scores"),
    "learner": ("batches scores", "metrics", "policy-versions"),
    "inference": ("policy-versions", "servers metrics", ""),
    "evaluator": ("policy-versions servers rollouts.a rollouts.out", "metrics", "evals"),
}
ALLOWED = {
    role: {
        topic: what
        for names, what in zip(lists, ("r", "w", "rw"), strict=True)
        for topic in names.split()
    }
    for role, lists in PARTS.items()
}


def run_file(name: str = "r") -> RunFile:
    return parse({"run": name, "envs": ENVS})


def test_an_env_may_touch_turns_only_if_it_records_its_own():
    envs = {
        "a": {"kind": "calculator"},
        "b": {"sessions": {}},
        "c": {"kind": "copy-digits"},
        "calculator": {},
    }
    found = acls.rules(parse({"run": "r", "envs": envs}))
    turns = {
        user: [(rule.name, rule.operations) for rule in rules if rule.name.startswith("r.turns.")]
        for user, rules in found.items()
        if user.startswith("env-")
    }
    assert turns == {
        "env-a": [("r.turns.a", ("READ", "WRITE"))],
        "env-c": [],
        "env-calculator": [("r.turns.calculator", ("READ", "WRITE"))],
    }


def test_a_host_may_touch_the_topics_of_its_envs_and_its_envs_have_no_users():
    envs = {"a": {"host": "x"}, "calculator": {"host": "x"}, "own": {}}
    found = acls.rules(parse({"run": "r", "envs": envs}))
    assert [user for user in found if user.startswith("env-")] == ["env-own"]
    topics = {
        rule.name: letters(rule.operations) for rule in found["host"] if rule.resource == "topic"
    }
    assert topics == {
        "r.demand": "r",
        "r.servers": "r",
        "r.rollouts.a": "w",
        "r.rollouts.calculator": "w",
        "r.turns.calculator": "rw",
        "r.metrics": "w",
        "r.journal.host-x": "rw",
    }


# ---- the rules -----------------------------------------------------------------------------------


def letters(operations: Any) -> str:
    return "".join(letter for letter, name in (("r", "READ"), ("w", "WRITE")) if name in operations)


def test_every_role_has_the_topics_of_its_part_and_no_others():
    rules = acls.rules(run_file())
    for role, wanted in ALLOWED.items():
        found = {
            rule.name: letters(rule.operations) for rule in rules[role] if rule.resource == "topic"
        }
        assert found == {f"r.{topic}": what for topic, what in wanted.items()}, role


def test_every_role_is_itself_and_nobody_else():
    names = {
        role: {str(rule) for rule in allowed if rule.resource != "topic"}
        for role, allowed in acls.rules(run_file()).items()
    }
    reader = str(Rule("group", "r.reader", ("DESCRIBE",)))
    assert names["buffer"] == {
        reader,
        str(Rule("transactional-id", "r.buffer", ("WRITE",))),
        str(Rule("group", "r.buffer", ("READ",))),
    }
    assert names["env-a"] == {
        reader,
        *(str(Rule("transactional-id", f"r.env-a-{i}", ("WRITE",))) for i in (0, 1)),
    }
    assert names["env-out"] == {reader, str(Rule("transactional-id", "r.out-outside", ("WRITE",)))}
    assert names["inference"] == {reader}
    writes = {str(Rule("transactional-id", f"r.scorer-{i}", ("WRITE",))) for i in (0, 1)}
    commits = {str(Rule("group", f"r.scorer-{i}", ("READ",))) for i in (0, 1)}
    assert names["scorer"] == {
        reader,
        *writes,
        *commits,
        str(Rule("group", "r.learner-lead", ("DESCRIBE",))),
    }


def test_of_a_learner_of_several_processes_a_scorer_knows_the_one_that_commits():
    run = parse({"run": "r", "envs": ENVS, "learner": {"processes": 2}})
    described = [rule.name for rule in acls.rules(run)["scorer"] if "DESCRIBE" in rule.operations]
    assert described == ["r.reader", "r.learner-lead"]


def test_who_rescores_reads_rollouts_and_writes_rewards():
    assert {str(rule) for rule in acls.rules(run_file())["rescorer"]} == {
        "READ       topic r.rollouts.a",
        "READ       topic r.rollouts.out",
        "READ       topic r.servers",
        "READ,WRITE,CREATE topic r.rewards.a",
        "READ,WRITE,CREATE topic r.rewards.out",
        "DESCRIBE   group r.reader",
        "WRITE      transactional-id r.rescore",
    }


def test_nothing_reaches_beyond_the_run():
    for role, allowed in acls.rules(run_file()).items():
        for rule in allowed:
            assert rule.name.startswith("r.") and not (
                rule.prefixed and role not in ("learner", "orchestrator", "auditor", "operator")
            ), (role, rule)


ON_B = {
    "READ       topic b.policy-versions",
    "WRITE      topic b.servers",
    "WRITE      topic b.metrics",
    "DESCRIBE   group b.reader",
}


def run_with(name: str, **inference: Any) -> RunFile:
    settings = {"learner": {"lora": {}}, "inference": inference}
    return parse({"run": name, "envs": ENVS, **settings})


def test_a_host_takes_no_rights_over_the_runs_that_it_serves():
    host = run_with("r", also_serves={"b": {}})
    assert {rule.name[0] for rules in acls.rules(host).values() for rule in rules} == {"r"}
    assert acls.rules_of_hosts(host) == {}


def test_a_guest_gives_its_host_the_rights_to_serve_it_and_no_more():
    guest = run_with("b", served_by=["r"])
    ((user, given),) = acls.rules_of_hosts(guest).items()
    assert user == "r.inference" and {str(rule) for rule in given} == ON_B
    lines = [line for line in acls.in_words(guest) if "User:r.inference" in line]
    assert {line.removeprefix("User:r.inference  ") for line in lines} == ON_B
    assert not [line for line in acls.in_words(run_with("b")) if "User:r." in line]


def test_manifests_of_a_host_have_the_rules_of_guests_that_have_agreed():
    """A KafkaUser is one resource, so a guest cannot add to that of its host."""
    host = run_with("r", also_serves={"b": {}})
    found = acls.rules(host, [run_with("b", served_by=["r"])])
    assert {str(rule) for rule in found["inference"] if rule.name[0] == "b"} == ON_B
    with pytest.raises(ConfigError, match="b has not agreed to be served by r"):
        acls.rules(host, [run_with("b")])
    with pytest.raises(ConfigError, match="run r does not serve c"):
        acls.rules(host, [run_with("c", served_by=["r"])])


WITH_SESSIONS = {
    "agent": {"kind": "copy-digits", "sessions": {}},
    "served": {"kind": "verifiers:gsm8k", "python": "/usr/bin/python3", "replicas": 2},
    "copy-digits": {"kind": "calculator"},
}


def test_the_gateway_and_the_assembler_touch_envs_with_sessions_only():
    found = acls.rules(parse({"run": "r", "envs": WITH_SESSIONS}))
    for role in ("gateway", "assembler"):
        names = {rule.name for rule in found[role] if rule.resource == "topic"}
        assert not {name for name in names if name.endswith(".copy-digits")}, role
        assert {"r.turns.agent", "r.turns.served"} <= names


def test_what_agents_and_env_servers_make_is_not_theirs_to_write():
    found = acls.rules(parse({"run": "r", "envs": WITH_SESSIONS}))
    assert "env-agent" not in found
    assert [str(rule) for rule in found["env-served"]] == ["WRITE      topic r.metrics"]


def test_envs_and_the_gateway_have_quotas():
    run = parse({"run": "r", "envs": WITH_SESSIONS})
    quotas = {
        manifest["metadata"]["name"]: manifest["spec"].get("quotas")
        for manifest in acls.manifests(run)
    }
    assert quotas["r.gateway"] == {
        "producerByteRate": 50_000_000,
        "consumerByteRate": 100_000_000,
        "requestPercentage": 100,
    }
    assert quotas["r.env-served"] == quotas["r.env-copy-digits"]
    assert quotas["r.env-served"] == {
        "producerByteRate": 20_000_000,
        "consumerByteRate": 20_000_000,
        "requestPercentage": 50,
    }
    assert quotas["r.buffer"] is None


def test_in_words():
    assert "User:r.learner  READ,WRITE topic r.policy-versions" in acls.in_words(run_file())
    assert "User:r.operator  ALL        topic r.*" in acls.in_words(run_file())


# ---- on a broker that keeps them -----------------------------------------------------------------


class People(NamedTuple):
    """A run on the broker, and its users."""

    secure: Secure
    run: RunFile

    def settings(self, role: str) -> dict[str, Any]:
        return self.secure.client(acls.user_name(self.run, role), f"password of {role}")

    def log(self, role: str) -> KafkaLog:
        return KafkaLog(self.settings(role), self.run.run)

    def refused(self, role: str, what: str) -> str:
        """The pattern of the one line that says so."""
        return (
            re.escape(
                f"user '{self.run.run}.{role}' may not {what} on {self.secure.address}; `streamrl"
                " topics acls RUN.yaml` lists"
            )
            + r"[^\n]*$"
        )


@pytest.fixture(scope="module")
def people(secure: Secure) -> People:
    made = People(secure, run_file(f"t{uuid.uuid4().hex[:10]}"))
    secure.add_users(
        {acls.user_name(made.run, role): f"password of {role}" for role in acls.rules(made.run)}
    )
    assert acls.apply(made.run, secure.admin) == acls.in_words(made.run)
    topic_changes.apply(made.run, made.settings("operator"))
    return made


def write(people: People, role: str, identity: str, *names: str) -> int:
    writer: KafkaWriter = people.log(role).writer(identity)
    try:
        return writer.commit([Message(name, b"key", b"value") for name in names])
    finally:
        writer.close()


def commit_offsets(people: People, role: str, identity: str, position: tuple[str, int]) -> None:
    writer = people.log(role).writer(identity)
    try:
        writer.commit_offsets({position: 0})
    finally:
        writer.close()


@pytest.mark.parametrize("role", ALLOWED)
def test_the_broker_allows_each_role_what_its_part_does_and_nothing_else(people: People, role: str):
    """The broker's own answer, for every topic of the run."""
    planned = [topic.name for topic in topics.plan(people.run)]
    admin = AdminClient(people.settings(role))
    futures = admin.describe_topics(TopicCollection(planned), include_authorized_operations=True)
    found: dict[str, str] = {}
    for name, future in futures.items():
        if future.exception() is None:
            allowed = {operation.name for operation in future.result().authorized_operations}
            assert allowed <= {"READ", "WRITE", "DESCRIBE"}, f"{role} may {allowed} {name}"
            found[name.removeprefix(f"{people.run.run}.")] = letters(allowed)
    assert {name: what for name, what in found.items() if what} == ALLOWED[role]


def test_an_env_does_its_work(people: People):
    log = people.log("env-a")
    assert write(people, "env-a", "env-a-0", "rollouts.a", "journal.env-a-0") == 0
    plain = log.producer()
    plain.send(Message("metrics", b"env-a-0", b"value"))
    plain.flush()
    plain.close()
    reader = log.reader(
        {
            (topic, 0): beginning_offset(log, topic, 0)
            for topic in ("demand", "servers", "journal.env-a-0")
        }
    )
    assert [message.topic for message in until(lambda: reader.poll(10, 0.1))] == ["journal.env-a-0"]
    reader.close()


def test_who_rescores_does_its_work_and_nothing_else(people: People):
    """It makes the topic of rewards itself; the rollouts stay as they are."""
    record = rollout("a")
    message = to_message(Output("rollouts.a", record.group_id, record))
    env = people.log("env-a").writer("env-a-0")
    env.commit([message])
    env.close()
    topic_changes.add(people.run, people.settings("rescorer"), "rewards.a")
    scorer = RewardScorer(
        name="brief", version="1", function=lambda *_: 0.25, env=None, limit_s=30.0
    )
    log = people.log("rescorer")
    result = asyncio.run(rescore(log, "a", scorer, {}))
    assert (result.rescored, result.after) == (1, 0.25)
    assert asyncio.run(rescore(log, "a", scorer, {})).known == 1
    with pytest.raises(AccessDenied, match="may not write to topic .*rollouts.a"):
        write(people, "rescorer", "rescore", "rollouts.a")
    with pytest.raises(AccessDenied):
        topic_changes.add(people.run, people.settings("rescorer"), "turns.a")


@pytest.mark.parametrize(
    "topic", ["batches", "policy-versions", "rollouts.out", "groups.a", "config"]
)
def test_an_env_cannot_read_what_is_not_its_business(people: People, topic: str):
    log = people.log("env-a")
    refused = people.refused("env-a", f"read topic {people.run.run}.{topic}")
    with pytest.raises(AccessDenied, match=refused):
        log.reader({(topic, 0): 0})
    with pytest.raises(AccessDenied, match=refused):
        end_offset(log, topic, 0)
    with pytest.raises(AccessDenied, match=refused):
        partitions_of(log, [topic])


@pytest.mark.parametrize("topic", ["rollouts.a", "metrics"])
def test_it_cannot_read_what_it_may_write(people: People, topic: str):
    reader = people.log("env-a").reader({(topic, 0): 0})
    with pytest.raises(
        AccessDenied, match=people.refused("env-a", f"read topic {people.run.run}.{topic}")
    ):
        until(lambda: reader.poll(10, 0.1))
    reader.close()


@pytest.mark.parametrize(
    "topic",
    [
        "batches",
        "policy-versions",
        "rollouts.out",
        "demand",
        "servers",
        "journal.buffer",
        "dead-letters.rollouts.a",
    ],
)
def test_an_env_cannot_write_what_is_not_its_own(people: People, topic: str):
    """Not in a transaction either, next to what is its own; and then nothing of that is written."""
    refused = people.refused("env-a", f"write to topic {people.run.run}.{topic}")
    before = end_offset(people.log("auditor"), "rollouts.a", 0)
    with pytest.raises(AccessDenied, match=refused):
        write(people, "env-a", "env-a-1", "rollouts.a", topic)
    plain = people.log("env-a").producer()
    with pytest.raises(AccessDenied, match=refused):
        plain.send(Message(topic, b"key", b"value"))
        plain.flush()
    log = people.log("auditor")
    assert end_offset(log, topic, 0) == 0
    reader = log.reader({("rollouts.a", 0): before})
    assert [message for _ in range(5) for message in reader.poll(10, 0.1)] == []
    reader.close()


def test_nobody_can_be_somebody_else(people: People):
    with pytest.raises(
        AccessDenied,
        match=people.refused("env-a", f"write as transactional id {people.run.run}.buffer"),
    ):
        people.log("env-a").writer("buffer")
    with pytest.raises(
        AccessDenied,
        match=people.refused("env-a", f"commit offsets of group {people.run.run}.env-a-0"),
    ):
        commit_offsets(people, "env-a", "env-a-0", ("servers", 0))
    assert write(people, "learner", "learner-another", "policy-versions") == 0
    commit_offsets(people, "learner", "learner-another", ("batches", 0))


def test_the_inference_agent_announces_nothing(people: People):
    plain = people.log("inference").producer()
    with pytest.raises(
        AccessDenied,
        match=people.refused("inference", f"write to topic {people.run.run}.policy-versions"),
    ):
        plain.send(Message("policy-versions", b"key", b"value"))
        plain.flush()


def test_topics_and_rules_are_the_operators(people: People):
    with pytest.raises(
        AccessDenied, match=people.refused("env-a", "make, describe or change topics")
    ):
        topic_changes.apply(people.run, people.settings("env-a"))
    with pytest.raises(AccessDenied, match=people.refused("operator", "change access rules")):
        acls.apply(people.run, people.settings("operator"))
    with pytest.raises(
        AccessDenied, match=people.refused("auditor", f"write to topic {people.run.run}.config")
    ):
        write(people, "operator", "operator", "config")
        plain = people.log("auditor").producer()
        plain.send(Message("config", b"key", b"value"))
        plain.flush()


def test_an_operator_has_nothing_to_say_in_another_run(people: People):
    with pytest.raises(AccessDenied, match="may not make, describe or change topics"):
        topic_changes.apply(run_file(f"{people.run.run}-b"), people.settings("operator"))


# ---- the door ------------------------------------------------------------------------------------


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long one tries is another matter."""
    for module in ("log", "admin", "committer", "writer"):
        monkeypatch.setattr(f"streamrl.stream.log.kafka.{module}.CALL_TIMEOUT_S", 0.7)
    monkeypatch.setattr("streamrl.stream.log.kafka.admin.Admin.visible_topics.__defaults__", (0.5,))


def test_a_wrong_password_a_false_certificate_and_no_tls_do_not_get_in(
    people: People, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    good = people.settings("buffer")
    false = make_certificates(tmp_path, ())
    quickly(monkeypatch)
    for settings, error, says in (
        (
            {**good, "sasl.password": "wrong-hunter2"},
            AccessDenied,
            "invalid credentials.*see `kafka` in the run file",
        ),
        ({**good, "sasl.username": "nobody"}, AccessDenied, "invalid credentials"),
        (
            {**good, "ssl.ca.location": str(false / "ca.pem")},
            AccessDenied,
            "certificate verify failed",
        ),
        (
            {"bootstrap.servers": people.secure.address},
            BrokerUnreachable,
            "no Kafka broker answers",
        ),
        (
            {**good, "security.protocol": "SASL_PLAINTEXT"},
            BrokerUnreachable,
            "no Kafka broker answers",
        ),
        (
            {**good, "ssl.ca.location": "/nowhere/ca.pem"},
            ConfigError,
            "librdkafka does not take these settings: .*ssl.ca.location",
        ),
        (
            {**good, "sasl.passwort": "wrong-hunter2"},
            ConfigError,
            'No such configuration property: "sasl.passwort"',
        ),
    ):
        with pytest.raises(error, match=says) as caught:
            KafkaLog(settings, people.run.run).topics()
        assert "hunter2" not in str(caught.value) and "\n" not in str(caught.value)


def test_the_administrators_door_wants_a_certificate(
    people: People, monkeypatch: pytest.MonkeyPatch
):
    quickly(monkeypatch)
    without = {
        name: value
        for name, value in people.secure.admin.items()
        if name not in ("ssl.key.location", "ssl.certificate.location")
    }
    with pytest.raises((AccessDenied, BrokerUnreachable)):
        KafkaLog(without, people.run.run).topics()


def test_a_broker_without_an_authorizer_says_so(broker: str):
    with pytest.raises(ConfigError, match="has no authorizer: everybody may do everything"):
        acls.apply(run_file(), {"bootstrap.servers": broker})


def test_a_host_reaches_topics_of_a_guest_once_the_guest_has_named_it(secure: Secure):
    """Neither the host's run file nor its rules give it anything there."""
    first, second = (f"t{uuid.uuid4().hex[:10]}" for _ in range(2))
    host = run_with(first, also_serves={second: {}})
    guest = People(secure, run_with(second, served_by=[first]))
    user = acls.user_name(host, "inference")
    operator = acls.user_name(guest.run, "operator")
    secure.add_users({user: "password of the host", operator: "password of operator"})
    acls.apply(host, secure.admin)
    acls.apply(run_with(second), secure.admin)
    topic_changes.apply(guest.run, guest.settings("operator"))
    there = KafkaLog(secure.client(user, "password of the host"), second)

    assert there.topics() == {}
    acls.apply(guest.run, secure.admin)
    until(lambda: set(there.topics()) == {"policy-versions", "servers", "metrics"}, 30)
    assert end_offset(there, "policy-versions", 0) == 0
    producer = there.producer()
    producer.send(Message("servers", b"first.inference-0", b"value"))
    producer.flush()
    producer.close()
    assert end_offset(guest.log("operator"), "servers", 0) == 1
    with pytest.raises(AccessDenied, match="may not"):
        there.writer("inference-0")
