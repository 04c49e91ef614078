"""Envs of a family share the topics of their rollouts and groups, and everything else that a run
does with an env it does with each of them alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from streamrl.batcher.process import paused
from streamrl.batcher.state import BatcherState, EnvQueue
from streamrl.buffer.process import reconcile, step
from streamrl.buffer.settings import buffer_config
from streamrl.buffer.state import BufferState
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.operation import Fork
from streamrl.extensions.dashboard import state as dashboard
from streamrl.extensions.dashboard.views import fates
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.extensions.recordings.fork_topics import copy_for_retraining, copy_inherited
from streamrl.extensions.recordings.replay import replay
from streamrl.run.monitoring.run_history import rollout_counts
from streamrl.stream.log import topics
from streamrl.stream.log.kafka import acls
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.records_of import messages_of, rollouts_of
from streamrl.stream.records import ENV_REMOVED, Batch, Demand, Fate, Rollout, ScoredGroup
from tests.support.batcher import CONFIG
from tests.support.build import rollout, rollout_event
from tests.support.data_path import (
    RUN,
    announce,
    parts,
    play,
    publish,
    published,
    running,
    send_groups,
    wait_for_batches,
)
from tests.support.waiting import until

ENVS = ["sums--easy", "sums--hard", "copy"]
SETTINGS = {
    **RUN.model_dump(mode="json"),
    "envs": {
        "sums--easy": {"fraction": 0.25},
        "sums--hard": {"fraction": 0.25},
        "copy": {"fraction": 0.5},
    },
}
FAMILY = run_file.parse(SETTINGS)
BATCHES = 4


def new_log(run: RunFile = FAMILY) -> MemoryLog:
    prefix = f"{run.run}."
    return MemoryLog({topic.name.removeprefix(prefix): 1 for topic in topics.plan(run)})


@pytest.fixture(scope="module")
def recording() -> MemoryLog:
    log = new_log()
    play(log, BATCHES, FAMILY)
    return log


def folded(log: MemoryLog, run: RunFile) -> dashboard.State:
    shown = dashboard.new(run)
    for topic in log.topics():
        for message in messages_of(log, topic):
            dashboard.fold(shown, message)
    return shown


def uids(log: MemoryLog, env: str) -> list[str]:
    return [record.rollout_uid for _, record, _ in rollouts_of(log, [env])]


def test_the_envs_of_a_family_have_one_topic_of_rollouts_and_one_of_groups():
    assert topology.family_of("sums--easy") == topology.family_of("sums--easy--a") == "sums"
    assert topology.family_of("sums-easy") == "sums-easy"
    names = {topic.name.removeprefix(f"{FAMILY.run}.") for topic in topics.plan(FAMILY)}
    per_env = {name for name in names if topology.kind_of(name) in ("rollouts", "groups")}
    assert per_env == {"rollouts.sums", "rollouts.copy", "groups.sums", "groups.copy"}
    assert {name for name in names if "sums" in name and "letters" in name} == {
        "dead-letters.rollouts.sums",
        "dead-letters.groups.sums",
    }
    journals = {name for name in names if name.startswith("journal.env-")}
    assert journals == {f"journal.env-{env}-0" for env in ENVS}


def test_a_record_belongs_to_the_env_that_it_names_if_the_topic_is_that_envs():
    assert topology.env_of("rollouts.sums", "sums--easy", ENVS) == "sums--easy"
    assert topology.env_of("rollouts.sums", "sums--other", ENVS) == "sums"
    assert topology.env_of("rollouts.sums", "copy", ENVS) == "sums"
    assert topology.env_of("rollouts.copy", "sums--easy", ENVS) == "copy"
    assert topology.env_of("rollouts.copy", "", ENVS) == "copy"


def test_each_env_has_its_share_and_its_fates(recording: MemoryLog):
    made = published(recording, "batches", Batch)
    assert len(made) >= BATCHES
    tokens = Counter[str]()
    for batch in made:
        for group, env in enumerate(batch.group_environments.tolist()):
            tokens[batch.environments[env]] += int((batch.groups == group).sum())
    assert tokens["sums--easy"] == tokens["sums--hard"]
    found = audit(recording, FAMILY)
    assert found.balanced and found.problems == []
    for env in ENVS:
        counts = sum((c for (of, _), c in found.counts.items() if of == env), Counter[str]())
        assert counts.total() == len(uids(recording, env)) == BATCHES * 5 * 2


def test_parts_replay_identically(recording: MemoryLog):
    for processor in parts(FAMILY):
        result, _ = replay(recording, processor)
        assert result.difference == "" and result.entries > 0


def test_the_rollouts_of_each_env_are_counted(recording: MemoryLog):
    each = BATCHES * 5 * 2
    assert rollout_counts(FAMILY, recording) == dict.fromkeys(ENVS, each)
    shown = folded(recording, FAMILY)
    assert [(row["env"], row["published"]) for row in fates(shown)] == [(e, each) for e in ENVS]
    assert_counted_alike(recording, FAMILY)


def assert_counted_alike(log: MemoryLog, run: RunFile) -> None:
    """The dashboard counts what the audit counts."""
    found = audit(log, run)
    for row in fates(folded(log, run)):
        counted = Counter[str]()
        for (env, _), counts in found.counts.items():
            counted += counts if env == row["env"] else Counter()
        assert counted == +Counter(row["counts"])


def forked_run(*overrides: str) -> RunFile:
    run = child_run_file(FAMILY, "other", overrides)
    return run.model_copy(update={"fork": Fork(run=FAMILY.run, version=2, sha256="ab")})


def test_a_fork_inherits_the_rollouts_of_each_env_that_it_has(recording: MemoryLog):
    run = forked_run()
    new = new_log(run)
    result = copy_inherited(recording, new, FAMILY, run, "file:///new/v2", True, time_s=1.0)
    assert result.rollouts and result.has_batch
    for env in ENVS:
        assert 0 < len(uids(new, env)) < len(uids(recording, env))
    assert audit(new, run).balanced

    without = run.model_copy(update={"envs": {e: run.envs[e] for e in ENVS if "hard" not in e}})
    smaller = new_log(without)
    copy_inherited(recording, smaller, FAMILY, without, "file:///new/v2", True, time_s=1.0)
    assert uids(smaller, "sums--hard") == [] and uids(smaller, "sums--easy")


def test_a_fork_that_trains_again_makes_the_batches_of_its_parent(recording: MemoryLog):
    run = child_run_file(FAMILY, "other", ())
    run = run.model_copy(update={"fork": Fork(run=FAMILY.run, version=0, sha256="ab")})
    new = new_log(run)
    copy_for_retraining(recording, new, FAMILY, run, "file:///new/v0", (), {})
    assert [batch.uids for batch in published(new, "batches", Batch)] == [
        batch.uids for batch in published(recording, "batches", Batch)
    ]


def test_a_rollout_of_an_env_that_the_run_does_not_have_is_a_dead_letter():
    log = new_log()
    foreign = rollout("sums--other", "sums--other-0", 0, 0)
    unknown = rollout("nobody", "nobody-0", 0, 0)
    wrong_key = rollout("sums--easy", "sums--easy-0", 0, 0)
    publish(
        log,
        Output("rollouts.sums", foreign.group_id, foreign),
        Output("rollouts.sums", unknown.group_id, unknown),
        Output("rollouts.sums", "another", wrong_key),
    )
    with running(log, FAMILY):
        until(lambda: len(published(log, "fates", Fate)) == 3, 60.0, "three fates")
    causes = [(fate.environment, fate.cause) for fate in published(log, "fates", Fate)]
    assert [env for env, _ in causes] == ["sums", "sums", "sums--easy"]
    assert "'sums--other', which the run file does not have" in causes[0][1]
    assert "'nobody', which the run file does not have" in causes[1][1]
    assert "its group would be split" in causes[2][1]
    assert len(list(messages_of(log, "dead-letters.rollouts.sums"))) == 3
    assert audit(log, FAMILY).balanced


def test_an_env_that_leaves_the_run_leaves_the_others_of_its_family_alone():
    """Its rollouts have a fate each, also those that come when it has left."""
    log = new_log()
    play(log, 2, FAMILY)
    rest = run_file.parse(
        {**SETTINGS, "envs": {"sums--easy": {"fraction": 0.5}, "copy": {"fraction": 0.5}}}
    )
    with running(log, rest):
        announce(log, 2)
        for env in ENVS:
            send_groups(log, env, range(10, 20), 2)
        wait_for_batches(log, 3)
        until(lambda: _fates_of(log, "sums--hard") == len(uids(log, "sums--hard")), 60.0, "fates")
    late = [fate for fate in published(log, "fates", Fate) if fate.environment == "sums--hard"]
    assert {fate.cause for fate in late if fate.fate == "filtered"} >= {ENV_REMOVED}
    assert not list(messages_of(log, "dead-letters.rollouts.sums"))
    assert rollout_counts(rest, log) == {"sums--easy": 40, "copy": 40}
    assert audit(log, rest).balanced
    assert_counted_alike(log, rest)
    for processor in parts(rest):
        assert replay(log, processor)[0].difference == ""
    with running(log, FAMILY):  # it is put back
        announce(log, 3)
        for env in ENVS:
            send_groups(log, env, range(20, 30), 3)
        made = wait_for_batches(log, 5)
    assert "sums--hard" in made[4].environments
    assert audit(log, FAMILY).balanced
    # Its producer is told of each group that has ended, also of those that nobody could use.
    last = {demand.environment: demand for demand in published(log, "demand", Demand)}
    assert last["sums--hard"].closed_groups == {"sums--hard-0": 2 * 5 + 10 + 10}


@pytest.mark.parametrize("env", ["sums--hard", "sums"])
def test_an_env_that_leaves_before_its_first_rollout_is_told_of_its_groups_when_it_is_back(
    env: str,
):
    """Its producer had begun groups, and waits for their ends."""
    config = replace(buffer_config(FAMILY, 0), envs=("sums--easy", env))
    state, _ = reconcile(config, BufferState(), {}, 0.0)
    rest = replace(config, envs=("sums--easy",))
    state, _ = reconcile(rest, state, {}, 0.0)
    event = rollout_event(0, rollout(env, f"{env}-0", 0, 0))
    state, outputs = step(rest, state, [event], 0.0)
    assert [(o.topic, o.record.fate) for o in outputs if isinstance(o.record, Fate)] == [
        ("fates", "filtered")
    ]
    state, outputs = reconcile(config, state, {}, 0.0)
    ends = [o.record for o in outputs if isinstance(o.record, ScoredGroup)]
    assert [(end.environment, end.group_id, end.uids) for end in ends] == [(env, f"{env}-0", [])]


def test_all_envs_of_a_family_count_anew_when_retention_has_cut_their_topic():
    """Also one that is out of the run: its rollouts are gone with those of the others."""
    config = buffer_config(FAMILY, 0)
    state, _ = reconcile(config, BufferState(), {}, 0.0)
    rest = replace(config, envs=("sums--easy", "copy"))
    state, outputs = reconcile(rest, state, {("rollouts.sums", 0): 5}, 0.0)
    begun = [o.record for o in outputs if isinstance(o.record, ScoredGroup)]
    assert [record.environment for record in begun if record.begins_epoch] == [
        "sums--easy",
        "sums--hard",
    ]


def _fates_of(log: MemoryLog, env: str) -> int:
    return sum(len(f.offsets) for f in published(log, "fates", Fate) if f.environment == env)


def test_a_topic_with_an_env_that_the_batch_lacks_is_read():
    config = replace(CONFIG, fractions=dict.fromkeys(ENVS, 1 / 3))
    state = BatcherState()
    for env in ("sums--easy", "copy"):
        state.queues[env] = EnvQueue(tokens=config.max_window_tokens)
    assert paused(config, state) == {"groups.sums", "groups.copy"}
    state.short = {"sums--hard": 10}
    assert paused(config, state) == {"groups.copy"}


def test_an_env_may_write_the_topic_of_its_family_and_no_other():
    rules = acls.rules(FAMILY)
    for user, topic in (("env-sums--easy", "rollouts.sums"), ("env-copy", "rollouts.copy")):
        written = {
            rule.name
            for rule in rules[user]
            if "WRITE" in rule.operations and ".rollouts." in rule.name
        }
        assert written == {f"{FAMILY.run}.{topic}"}
    read = {rule.name for rule in rules["rescorer"] if ".rollouts." in rule.name}
    assert read == {f"{FAMILY.run}.rollouts.sums", f"{FAMILY.run}.rollouts.copy"}


def test_the_dead_letters_of_turns_are_those_of_one_env():
    agents = {"kind": "guess-number"}
    envs = {"sums": agents, "sums--agent": {**agents, "sessions": {}}}
    rules = acls.rules(run_file.parse({"run": "r", "envs": envs}))
    letters = {r.name for r in rules["assembler"] if r.name.startswith("r.dead-letters")}
    assert letters == {"r.dead-letters.turns.sums--agent"}


def test_a_family_may_have_the_name_of_an_env():
    run = run_file.parse(
        {**SETTINGS, "envs": {"sums": {"fraction": 0.5}, "sums--hard": {"fraction": 0.5}}}
    )
    log = new_log(run)
    play(log, 2, run)
    assert rollout_counts(run, log) == {"sums": 20, "sums--hard": 20}
    assert audit(log, run).balanced
    assert {r.environment for r in published(log, "rollouts.sums", Rollout)} == set(run.envs)
    assert len(uids(log, "sums")) == len(uids(log, "sums--hard")) == 20
    rest = run.model_copy(update={"envs": {"sums": run.envs["sums"]}})
    assert rollout_counts(rest, log) == {"sums": 20}
