"""Forks of a short recorded run, from log to log: the weights, which need a learner, are in
tests/learner/test_recompute.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.buffer.advantages import grpo
from streamrl.config import topology
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.extensions.recordings.fork_topics import copy_for_retraining, copy_inherited
from streamrl.extensions.recordings.replay import replay
from streamrl.learner.model.examples import expand
from streamrl.stream.log.codec import encode
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Rollout, ScoredGroup
from tests.support.build import rollout
from tests.support.data_path import (
    RUN,
    TOPICS,
    announce,
    publish,
    published,
    running,
    send_groups,
    wait_for_batches,
)
from tests.support.forks import ENVS, VERSION, batches, fork, recorded_run


@pytest.fixture(scope="module")
def parent() -> MemoryLog:
    return recorded_run()


def test_another_advantage_is_worked_out_from_the_recorded_rewards(parent: MemoryLog):
    _, log = fork(parent, "buffer.advantage=grpo")
    (batch,), then = batches(log), batches(parent)[VERSION]
    assert batch.uids == then.uids and batch.advantages.tolist() != then.advantages.tolist()
    for index in range(len(batch.group_ids)):
        mine = batch.groups == index
        assert batch.advantages[mine].tolist() == grpo(then.rewards[mine]).tolist()
    assert expand(batch).input_ids.tolist() == expand(then).input_ids.tolist()


def test_other_fractions_choose_among_the_same_groups(parent: MemoryLog):
    """Groups of 10 tokens, a budget of 80: three quarters are 6 groups of `copy`, and nothing is
    owed from before. Work may begin for three batches, so 6 groups of `add` were asked for, and the
    two oldest of them come first. How many there are depends on when the parent's came.
    """
    result, log = fork(parent, "envs.copy.fraction=0.75", "envs.add.fraction=0.25")
    assert result.run.fork is not None and result.run.fork.balance == {}
    (batch,) = batches(log)
    chosen = [
        (batch.environments[env], name)
        for env, name in zip(batch.group_environments, batch.group_ids, strict=True)
    ]
    assert {env: sum(e == env for e, _ in chosen) for env in RUN.envs} == {"copy": 6, "add": 2}
    then = set(batches(parent)[VERSION].group_ids)
    held = [group.group_id for group in published(log, topology.groups("add"), ScoredGroup)]
    assert [name for env, name in chosen if env == "add"] == held[-6:][:2]
    assert then & {name for env, name in chosen if env == "copy"} == {
        name for name in then if name.startswith("copy")
    }


def test_a_stricter_age_leaves_out_what_is_older(parent: MemoryLog):
    _, log = fork(
        parent, "buffer.max_age=0", "batcher.lookahead=0", "batcher.total_token_budget=40"
    )
    (batch,) = batches(log)
    assert batch.oldest_versions.tolist() == [VERSION] * len(batch.uids)


def test_what_was_trained_on_or_sampled_later_is_left_behind(parent: MemoryLog):
    result, log = fork(parent)
    copied = [
        record for env in RUN.envs for record in published(log, topology.rollouts(env), Rollout)
    ]
    before = {name for batch in batches(parent)[:VERSION] for name in batch.group_ids}
    assert result.rollouts == len(copied) == 2 * result.groups
    assert not before & {record.group_id for record in copied}
    assert {record.newest_policy_version for record in copied} <= {0, 1, 2}


def test_the_parts_go_on_from_there_and_the_books_are_in_order(parent: MemoryLog):
    """The fork's own versions from now on; then it balances, replays, and every copy has met one
    fate.
    """
    result, log = fork(parent)
    with running(log, result.run):
        for version in (3, 4):
            announce(log, version)
            for env in RUN.envs:
                send_groups(log, env, range(version * 5 + 20, version * 5 + 25), version)
        later = wait_for_batches(log, 3)
    assert [batch.number for batch in later[:3]] == [2, 3, 4]
    parts = [buffer.make_processor(result.run), batcher.make_processor(result.run)]
    account = audit(log, result.run)
    assert account.balanced, account.problems
    assert [replay(log, part)[0].difference for part in parts] == ["", ""]
    assert not set(later[0].uids) & {uid for batch in later[1:] for uid in batch.uids}


def test_a_fork_can_be_forked(parent: MemoryLog):
    result, log = fork(parent)
    again, second = fork(log, parent=result.run)
    assert again.has_batch and encode(batches(second)[0]) == encode(batches(parent)[VERSION])


def test_at_the_newest_version_there_may_be_no_batch_yet():
    """Two groups are not enough: they are there, and the next one makes the batch."""
    log = MemoryLog({**TOPICS, **ENVS})
    with running(log):
        announce(log, 0)
        send_groups(log, "copy", range(2), 0)
        while len(published(log, "groups.copy", ScoredGroup)) < 2:
            pass
    result, _ = fork(log, version=0)
    assert (result.groups, result.rollouts, result.has_batch) == (2, 4, False)


def test_a_fork_of_a_long_run_reads_rollouts_only_when_it_has_heard_of_their_version():
    """Rollouts of version 20 would be refused by a buffer that has heard of none."""
    run = child_run_file(RUN, "other", ()).model_copy(
        update={"fork": Fork(run="small", version=20, sha256="ab")}
    )
    part = buffer.make_processor(run)
    assert part.paused(part.config, part.initial()) == {"rollouts.copy", "rollouts.add"}
    log = MemoryLog(TOPICS)
    send_groups(log, "copy", range(30), 20)
    with running(log, run):
        for version in range(21):
            announce(log, version)
        send_groups(log, "add", range(30), 20)
        assert wait_for_batches(log, 1)[0].number == 20
    assert published(log, "dead-letters.rollouts.copy", Rollout) == []


def test_the_buffer_waits_for_no_version_in_a_run_that_is_no_fork():
    part = buffer.make_processor(RUN)
    assert part.paused(part.config, part.initial()) == frozenset()


def test_rollouts_of_no_group_that_is_open_are_not_looked_for(parent: MemoryLog):
    """Whatever is recorded after the versions that a fork shares changes nothing of it."""
    before = fork(parent)[0]
    publish(parent, Output("rollouts.copy", "late", rollout("copy", "late", 0, 3)))
    assert fork(parent)[0][1:] == before[1:]


def test_rewards_of_the_recording_tell_the_functions_apart(parent: MemoryLog):
    """Otherwise the test of another advantage could not fail."""
    assert any(
        np.ptp(batches(parent)[VERSION].rewards[batches(parent)[VERSION].groups == g]) > 0
        for g in range(4)
    )


def test_on_a_broker_a_fork_reads_what_it_has_just_written(
    parent: MemoryLog, broker: str, run_name: str
):
    """A transaction may be committed before its records are visible: the first batch is made of
    them all the same, and so are the batches of a fork that trains again.
    """
    fork = Fork(run=RUN.run, version=VERSION, sha256="ab")
    kafka = {"bootstrap.servers": broker}
    for name in (run_name, f"{run_name}-again"):
        run = child_run_file(RUN, name, ()).model_copy(update={"fork": fork})
        topic_changes.create(run, kafka, {})
        log = KafkaLog(kafka, name)
        if name == run_name:
            result = copy_inherited(parent, log, RUN, run, "file:///new", True, time_s=1.0)
        else:
            result = copy_for_retraining(parent, log, RUN, run, "file:///new", (), {})
        assert result.has_batch and result.rollouts > 0
        assert encode(batches(log)[0]) == encode(batches(parent)[VERSION])
        assert audit(log, result.run).balanced
