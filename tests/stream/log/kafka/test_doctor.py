"""Whether what a cluster lacks is found, on brokers that lack one thing each."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from streamrl.config.run_file import RunFile
from streamrl.stream.local_kafka import broker as local
from streamrl.stream.local_kafka.broker import Setup
from streamrl.stream.log.kafka import acls, doctor
from streamrl.stream.log.kafka.acls import Rule
from streamrl.stream.log.kafka.admin import Admin
from streamrl.stream.log.kafka.doctor import Finding, Trial, examine, seconds_ahead
from tests.stream.log.test_topics import run_file
from tests.support.kafka import topics_at
from tests.support.mock_cluster import MockCluster
from tests.support.secure import Secure
from tests.support.waiting import patience

DAY_MS = 24 * 3_600_000


@pytest.fixture
def cluster(broker: str) -> dict[str, Any]:
    return {"bootstrap.servers": broker}


def tried(trial: Trial, *checks: str) -> dict[str, Finding]:
    """The findings of some checks, and of those that they need. Nothing is left on the broker."""
    found: dict[str, Finding] = {}
    try:
        for name in ("topics", *checks):
            found[name] = doctor.carry_out(name, doctor.CHECKS[name], trial)
    finally:
        trial.remove()
    return found


def test_a_broker_of_ours_lacks_nothing_and_is_left_as_it_was(
    cluster: dict[str, Any], run_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    # A machine that runs tests is slow, and its disk may be full.
    monkeypatch.setattr(doctor, "SLOW_S", patience(30.0))
    monkeypatch.setattr(doctor, "FREE_FRACTION", 0.0)
    found = {f.check: f for f in examine(Trial(run_file(run_name), cluster, data=tmp_path))}
    assert list(found) == [*doctor.CHECKS, "removal"]
    assert [f for f in found.values() if f.status == "missing"] == []
    assert [f.check for f in found.values() if f.status == "unseen"] == ["access rules"]
    assert "median" in found["latency"].text and "8,384,512 bytes" in found["message size"].text
    assert not [name for name in topics_at(cluster["bootstrap.servers"]) if run_name in name]
    groups = AdminClient(cluster).list_consumer_groups().result(patience(10)).valid
    assert not [group for group in groups if run_name in group.group_id]


def test_what_was_made_goes_when_the_caller_stops_early(cluster: dict[str, Any], run_name: str):
    findings = examine(Trial(run_file(run_name), cluster))
    while next(findings).check != "topics":
        pass
    assert [name for name in topics_at(cluster["bootstrap.servers"]) if run_name in name]
    findings.close()
    assert not [name for name in topics_at(cluster["bootstrap.servers"]) if run_name in name]


def test_more_copies_than_brokers(cluster: dict[str, Any], run_name: str):
    """What else there is to find is found all the same."""
    run = run_file(run_name, replicas=3)
    found = tried(Trial(run, cluster), "copies", "transactions")
    assert found["copies"].status == "missing"
    assert found["copies"].text == (
        "topics.replicas is 3, and there is 1 broker; add brokers, or set it to 1"
    )
    assert found["transactions"].status == "ok"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"replicas": 1}, "there are 3 brokers: the run waits while one of them is away"),
        ({"replicas": 2, "config": {"min.insync.replicas": "3"}}, "set it to 1 in topics.config"),
        ({}, "3 copies of each record on 3 brokers, of which 1 may be away"),
    ],
)
def test_copies_on_three_brokers(settings: dict[str, Any], expected: str):
    brokers = MockCluster(3, ["r.batches"])
    trial = Trial(run_file(**settings), {"bootstrap.servers": brokers.address})
    found = doctor.carry_out("copies", doctor.count_copies, trial)
    assert expected in found.text
    assert (found.status == "ok") == (settings == {})


def test_a_cluster_that_keeps_no_transactions_apart():
    """librdkafka's mock: it accepts all calls, and does nothing of what they are for."""
    brokers = MockCluster(1, ["r.doctor-x"])
    trial = Trial(run_file(), {"bootstrap.servers": brokers.address})
    trial.topic = trial.identity = "doctor-x"
    found = {
        name: doctor.carry_out(name, doctor.CHECKS[name], trial)
        for name in ("transactions", "fencing", "stable offset")
    }
    assert [f.status for f in found.values()] == ["missing"] * 3
    assert "sees 'committed, aborted, committed as well'" in found["transactions"].text
    assert "two producers of one transactional id can both commit" in found["fencing"].text
    assert "with a transaction open before the end" in found["stable offset"].text


def test_a_topic_that_takes_only_small_messages(cluster: dict[str, Any], run_name: str):
    run = run_file(run_name, config={"max.message.bytes": "1000"})
    found = tried(Trial(run, cluster), "transactions", "message size")
    assert (found["transactions"].status, found["message size"].status) == ("ok", "missing")
    assert "max.message.bytes of the topic is 1000" in found["message size"].text


def test_a_clock_that_is_ahead(cluster: dict[str, Any], run_name: str):
    trial = Trial(run_file(run_name), cluster, clock=lambda: time.time() + 7200)
    found = tried(trial, "clocks")["clocks"]
    assert found.status == "missing"
    assert "s ahead of the broker's; run NTP" in found.text
    assert 7190 < float(found.text.split()[3]) <= 7200


def test_seconds_ahead_by_hand():
    assert seconds_ahead(10.0, 10.5, 11.0) == 0.0
    assert seconds_ahead(10.0, 7.0, 11.0) == 3.0
    assert seconds_ahead(10.0, 13.0, 11.0) == -2.0


def test_settings_of_brokers_that_no_run_can_live_with(tmp_path: Path, run_name: str):
    properties = {
        "transaction.max.timeout.ms": "30000",
        "log.cleaner.min.compaction.lag.ms": str(DAY_MS),
    }
    started = local.start(tmp_path, setup=Setup(properties))
    try:
        trial = Trial(run_file(run_name), {"bootstrap.servers": started.address})
        found = tried(trial, "compaction", "transactions")
    finally:
        started.stop()
    assert found["compaction"].status == found["transactions"].status == "missing"
    assert f"min.compaction.lag.ms is {DAY_MS}" in found["compaction"].text
    assert "transaction timeout" in found["transactions"].text.lower()


def test_transactions_that_take_long(
    cluster: dict[str, Any], run_name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "SLOW_S", 0.0)
    found = tried(Trial(run_file(run_name), cluster), "latency")["latency"]
    assert found.status == "missing" and "SlowTransactions" in found.text


def test_a_disk_that_is_full(
    cluster: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100_000, 86_000, 14_000))
    trial = Trial(run_file(), cluster, data=tmp_path)
    assert doctor.carry_out("room", doctor.look_for_room, trial).status == "missing"


def test_a_broker_that_never_answers_is_not_waited_for(
    cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "CHECK_LIMIT_S", 0.01)
    answer = threading.Event()
    found = doctor.carry_out("x", lambda trial: str(answer.wait()), Trial(run_file(), cluster))
    answer.set()
    assert found == Finding("x", "missing", "no answer within 0 s")


def test_without_a_broker_nothing_is_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Admin.visible_topics, "__defaults__", (0.1,))
    trial = Trial(run_file(), {"bootstrap.servers": "127.0.0.1:1"})
    first, *others = examine(trial)
    assert first.status == "missing" and "no Kafka broker answers at 127.0.0.1:1" in first.text
    assert {(f.status, f.text) for f in others} == {
        ("unseen", "not tried, because of brokers"),
        ("ok", "nothing was made"),
    }


# ---- on a broker with access rules ---------------------------------------------------------------


def client(secure: Secure, run: RunFile, name: str, *rules: Rule) -> dict[str, Any]:
    """librdkafka settings of a new user who has these rules."""
    user = acls.user_name(run, name)
    secure.add_users({user: f"password of {name}"})
    admin = AdminClient(secure.admin)
    for rule in rules:
        for future in admin.create_acls(list(acls.bindings(user, rule))).values():
            future.result(patience(10))
    return secure.client(user, f"password of {name}")


def new_run() -> RunFile:
    return run_file(f"t{uuid.uuid4().hex[:10]}")


def test_an_operator_may_do_it_all(secure: Secure):
    run = new_run()
    acls.apply(run, secure.admin)
    trial = Trial(run, client(secure, run, "operator"))
    found = tried(trial, "access", "access rules", "transactions", "offsets", "own topics")
    assert {f.check for f in found.values() if f.status == "missing"} == set()
    assert "only an administrator sees rules" in found["access rules"].text
    assert "this user does not see __transaction_state" in found["own topics"].text


def test_an_administrator_sees_which_rules_are_missing(secure: Secure):
    run = new_run()
    trial = Trial(run, secure.admin)
    assert doctor.carry_out("rules", doctor.list_access_rules, trial).status == "unseen"
    acls.apply(run, secure.admin)
    found = doctor.carry_out("rules", doctor.list_access_rules, trial)
    assert found == Finding(
        "rules", "ok", f"all {len(acls.in_words(run))} rules of the roles are there"
    )
    more = run.model_copy(update={"envs": {**run.envs, "new": run.envs["a"]}})
    found = doctor.carry_out("rules", doctor.list_access_rules, Trial(more, secure.admin))
    assert found.status == "missing" and f"User:{run.run}.env-new" in found.text


def test_a_transactional_id_that_is_refused(secure: Secure):
    run = new_run()
    rules = [Rule(kind, f"{run.run}.", ("ALL",), True) for kind in ("topic", "group")]
    found = tried(Trial(run, client(secure, run, "some", *rules)), "access", "transactions")
    assert found["access"].status == "ok"
    assert found["transactions"].status == "missing"
    assert f"'{run.run}.some' may not write as transactional id" in found["transactions"].text


def test_rights_on_topics_that_are_refused(secure: Secure):
    run = new_run()
    rule = Rule(
        "topic", f"{run.run}.", ("CREATE", "READ", "WRITE", "DESCRIBE_CONFIGS", "DELETE"), True
    )
    found = tried(Trial(run, client(secure, run, "some", rule)), "access")["access"]
    assert found.status == "missing" and "may not ALTER, ALTER_CONFIGS topics" in found.text


def test_a_user_who_may_make_no_topics(secure: Secure):
    run = new_run()
    findings = {f.check: f for f in examine(Trial(run, client(secure, run, "nobody")))}
    assert findings["topics"].status == "missing"
    assert f"'{run.run}.nobody' may not make, describe or change topics" in findings["topics"].text
    assert findings["fencing"] == Finding("fencing", "unseen", "not tried, because of topics")
