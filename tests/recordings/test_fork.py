"""Forks of a short recorded run, from log to log: the weights, which need a learner, are in
tests/learner/test_recompute.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from streamrl.batcher import process as batcher
from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.buffer import process as buffer
from streamrl.buffer.advantages import grpo
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile, changed
from streamrl.config.sections.operation import Fork
from streamrl.errors import ConfigError, StreamrlError
from streamrl.learner.examples import expand
from streamrl.log.codec import encode
from streamrl.log.memory import MemoryLog
from streamrl.log.protocol import Output
from streamrl.processor.definition import ProcessorState
from streamrl.processor.journal import last_record
from streamrl.processor.transaction import process_batch
from streamrl.recordings.audit import audit
from streamrl.recordings.fork import ForkResult, child_run_file, copy_topics
from streamrl.recordings.replay import replay
from streamrl.records import Batch, EnvProgress, PolicyVersion, Rollout, Visit
from tests.support.build import rollout
from tests.support.data_path import (
    RUN,
    TOPICS,
    announce,
    found,
    play,
    publish,
    running,
    send_groups,
    wait_for_batches,
)

ENVS = {f"journal.env-{env}-0": 1 for env in RUN.envs}
VERSION = 2


@pytest.fixture(scope="module")
def parent() -> MemoryLog:
    """Four batches, more rollouts than they took, and envs that have posed 40 problems each."""
    log = MemoryLog({**TOPICS, **ENVS})
    for env in RUN.envs:
        publish(
            log,
            Output(
                f"journal.env-{env}-0",
                f"{env}-0",
                EnvProgress(producer=f"{env}-0", next_problem=40, published_groups=40),
            ),
        )
    play(log)
    return log


def fork(
    log: MemoryLog,
    *overrides: str,
    version: int = VERSION,
    with_rollouts: bool = True,
    parent: RunFile = RUN,
) -> tuple[ForkResult, MemoryLog]:
    run = child_run_file(parent, "other", overrides).model_copy(
        update={"fork": Fork(run=parent.run, version=version, sha256="ab")}
    )
    new = MemoryLog({**TOPICS, **ENVS})
    return copy_topics(log, new, parent, run, "file:///new/v000002", with_rollouts, time_s=1.0), new


def batches(log: MemoryLog) -> list[Batch]:
    return [record for record in found(log, "batches", "batch") if isinstance(record, Batch)]


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_without_a_change_the_first_batch_is_the_parents_byte_for_byte(
    parent: MemoryLog, version: int
):
    made, log = fork(parent, version=version)
    (batch,) = batches(log)
    assert made.has_batch and batch.number == version
    assert encode(batch) == encode(batches(parent)[version])


SMALL = changed(
    RUN,
    (
        "buffer.group_size=3",
        "buffer.max_window_tokens=400",
        "batcher.lookahead=1",
        "envs.copy.fraction=0.4",
        "envs.add.fraction=0.25",
    ),
)
PARTITIONED = {
    **TOPICS,
    **ENVS,
    **{f"{kind}.{env}": 2 for kind in ("rollouts", "groups") for env in RUN.envs},
}


TAUGHT = changed(
    SMALL,
    (
        "envs.copy.fraction=0",
        "envs.add.fraction=0",
        "batcher.curriculum.kind=stages",
        (
            "batcher.curriculum.stages=[{fractions: {copy: 0.8}, until: {env: copy, reward: 0.45,"
            " batches: 2}}, {fractions: {add: 0.7}}]"
        ),
    ),
)


def wander(seed: int, run: RunFile = SMALL) -> MemoryLog:
    """A run in which rollouts, failures, versions and the two parts come in any order: groups in
    pieces, aged out, late, held, a batcher behind.
    """
    rng = random.Random(seed)
    log = MemoryLog(PARTITIONED)
    parts = [buffer.part(run), batcher.part(run)]
    folds = [
        ProcessorState(
            part.initial(),
            offsets={(t, p): 0 for t in part.inputs for p in range(log.topics()[t])},
        )
        for part in parts
    ]
    writers = [log.writer(part.name) for part in parts]
    readers = [log.reader(fold.offsets) for fold in folds]
    announce(log, 0)
    version = 0
    number = 0
    waiting = list[Rollout]()
    for _ in range(500):
        which = rng.randrange(6)
        if which == 0 and len(batches(log)) > version:
            version += 1
            announce(log, version)
        elif which in (1, 2):
            number += 1
            env = rng.choice(list(RUN.envs))
            oldest = max(0, version - rng.randrange(3))
            for i in range(3):
                how = (
                    {"failure": "x"}
                    if rng.random() < 0.1
                    else {"newest": rng.randint(oldest, version), "reward": rng.random()}
                )
                waiting.append(rollout(env, f"{env}-{number}", i, oldest, **how))
            rng.shuffle(waiting)
            for record in waiting[: rng.randrange(6)]:
                waiting.remove(record)
                publish(log, Output(topology.rollouts(record.environment), record.group_id, record))
        else:
            i = which % 2
            readers[i].set_paused(parts[i].paused(parts[i].config, folds[i].state))
            if messages := readers[i].poll(rng.randint(1, 9), 0):
                process_batch(parts[i], folds[i], messages, 0.0, writers[i].commit)
    return log


@pytest.mark.parametrize(
    ("seed", "parent"), [*((seed, SMALL) for seed in range(8)), (0, TAUGHT), (1, TAUGHT)]
)
def test_so_it_is_in_whatever_order_things_came(seed: int, parent: RunFile):
    log = wander(seed, parent)
    assert len(batches(log)) >= 4
    stages = list[int]()
    for batch in batches(log)[:-1]:
        run = child_run_file(parent, "other", ()).model_copy(
            update={"fork": Fork(run="small", version=batch.number, sha256="ab")}
        )
        new = MemoryLog(PARTITIONED)
        made = copy_topics(log, new, parent, run, "", True, time_s=1.0)
        # a stage that ends with it may let the groups held make the next one too, there as here
        first = batches(new)
        assert first and [encode(batch) for batch in first] == [
            encode(batch) for batch in batches(log)[batch.number :][: len(first)]
        ]
        assert len(first) == 1 or parent is TAUGHT
        stages.append(made.run.fork.stage if made.run.fork else -1)
    assert stages == sorted(stages) and (stages[0], stages[-1]) == (0, int(parent is TAUGHT))


def test_another_advantage_is_worked_out_from_the_recorded_rewards(parent: MemoryLog):
    _, log = fork(parent, "buffer.advantage=grpo")
    (batch,), then = batches(log), batches(parent)[VERSION]
    assert batch.uids == then.uids and batch.advantages.tolist() != then.advantages.tolist()
    for index in range(len(batch.group_ids)):
        mine = batch.groups == index
        assert batch.advantages[mine].tolist() == grpo(then.rewards[mine]).tolist()
    assert expand(batch).input_ids.tolist() == expand(then).input_ids.tolist()


def test_other_fractions_choose_among_the_same_groups(parent: MemoryLog):
    """Groups of 10 tokens, a budget of 80: three quarters are 6 groups of `copy`, the newest first,
    and nothing is owed from before.
    """
    made, log = fork(parent, "envs.copy.fraction=0.75", "envs.add.fraction=0.25")
    assert made.run.fork is not None and made.run.fork.balance == {}
    (batch,) = batches(log)
    chosen = [
        (batch.environments[env], name)
        for env, name in zip(batch.group_environments, batch.group_ids, strict=True)
    ]
    assert {env: sum(e == env for e, _ in chosen) for env in RUN.envs} == {"copy": 6, "add": 2}
    then = set(batches(parent)[VERSION].group_ids)
    newest_add = [name for name in batches(parent)[VERSION].group_ids if name.startswith("add")][:2]
    assert [name for env, name in chosen if env == "add"] == newest_add
    assert then & {name for env, name in chosen if env == "copy"} == {
        name for name in then if name.startswith("copy")
    }


def test_a_stricter_age_leaves_out_what_is_older(parent: MemoryLog):
    _, log = fork(
        parent, "buffer.max_age=0", "batcher.lookahead=0", "batcher.total_token_budget=40"
    )
    (batch,) = batches(log)
    assert batch.oldest_versions.tolist() == [VERSION] * len(batch.uids)


def test_versions_up_to_the_first_are_inherited_and_that_one_lies_in_the_forks_store(
    parent: MemoryLog,
):
    _, log = fork(parent, with_rollouts=False)
    versions = [
        record
        for record in found(log, "policy-versions", "policy-version")
        if isinstance(record, PolicyVersion)
    ]
    assert [(v.version, v.uri) for v in versions] == [(0, ""), (1, ""), (2, "file:///new/v000002")]
    assert found(log, "rollouts.copy", "rollout") == [] and batches(log) == []


def test_what_was_trained_on_or_sampled_later_is_left_behind(parent: MemoryLog):
    made, log = fork(parent)
    copied = [
        record
        for env in RUN.envs
        for record in found(log, topology.rollouts(env), "rollout")
        if isinstance(record, Rollout)
    ]
    before = {name for batch in batches(parent)[:VERSION] for name in batch.group_ids}
    assert made.rollouts == len(copied) == 2 * made.groups
    assert not before & {record.group_id for record in copied}
    assert {record.newest_policy_version for record in copied} <= {0, 1, 2}


def test_envs_pose_the_next_problems_and_are_credited_with_the_groups_they_have(parent: MemoryLog):
    made, log = fork(parent)
    progress = {env: last_record(log, f"journal.env-{env}-0", EnvProgress) for env in RUN.envs}
    assert all(
        p is not None and p.next_problem == 40 and p.open_problems == [] for p in progress.values()
    )
    assert sum(p.published_groups for p in progress.values() if p) == made.groups
    assert all(p is not None and p.published_groups > 0 for p in progress.values())


def test_the_parts_go_on_from_there_and_the_books_are_in_order(parent: MemoryLog):
    """The fork's own versions from now on; then it balances, replays, and every copy has met one
    fate.
    """
    made, log = fork(parent)
    with running(log, made.run):
        for version in (3, 4):
            announce(log, version)
            for env in RUN.envs:
                send_groups(log, env, range(version * 5 + 20, version * 5 + 25), version)
        later = wait_for_batches(log, 3)
    assert [batch.number for batch in later[:3]] == [2, 3, 4]
    parts = [buffer.part(made.run), batcher.part(made.run)]
    account = audit(log, list(RUN.envs), "lead", parts)
    assert account.balanced, account.problems
    assert [replay(log, part)[0].difference for part in parts] == ["", ""]
    assert not set(later[0].uids) & {uid for batch in later[1:] for uid in batch.uids}


def test_what_is_known_of_problems_is_inherited_as_far_as_it_was_known_by_then():
    """Two of three visits are by versions up to the fork's; and none where the problems are
    others.
    """
    filtered = changed(RUN, ["envs.copy.pass_rate={high: 0.9}", "envs.add.pass_rate={high: 0.9}"])
    log = MemoryLog({**TOPICS, **ENVS, "visits.copy": 1})
    announce(log, 0)
    visits = [
        Visit(environment="copy", problem=i, epoch=0, passed=2, rollouts=2, policy_version=version)
        for i, version in enumerate((0, 2, 3))
    ]
    publish(log, *(Output("visits.copy", f"{visit.problem}-0", visit) for visit in visits))
    for overrides, expected in (
        ((), visits[:2]),
        (("envs.copy.params={digits: 3}",), []),
        (("envs.copy.pass_rate=null",), []),
    ):
        run = child_run_file(filtered, "other", overrides).model_copy(
            update={"fork": Fork(run="small", version=VERSION, sha256="ab")}
        )
        new = MemoryLog({**TOPICS, **ENVS, "visits.copy": 1, "visits.add": 1})
        copy_topics(log, new, filtered, run, "", False, time_s=1.0)
        assert found(new, "visits.copy", "visit") == expected


def test_a_fork_can_be_forked(parent: MemoryLog):
    made, log = fork(parent)
    again, second = fork(log, parent=made.run)
    assert again.has_batch and encode(batches(second)[0]) == encode(batches(parent)[VERSION])


def test_at_the_newest_version_there_may_be_no_batch_yet():
    """Two groups are not enough: they are there, and the next one makes the batch."""
    log = MemoryLog({**TOPICS, **ENVS})
    with running(log):
        announce(log, 0)
        send_groups(log, "copy", range(2), 0)
        while len(found(log, "groups.copy", "scored-group")) < 2:
            pass
    made, _ = fork(log, version=0)
    assert (made.groups, made.rollouts, made.has_batch) == (2, 4, False)


def test_a_fork_of_a_long_run_reads_rollouts_only_when_it_has_heard_of_their_version():
    """Rollouts of version 20 would be refused by a buffer that has heard of none."""
    run = child_run_file(RUN, "other", ()).model_copy(
        update={"fork": Fork(run="small", version=20, sha256="ab")}
    )
    part = buffer.part(run)
    assert part.paused(part.config, part.initial()) == {"rollouts.copy", "rollouts.add"}
    log = MemoryLog(TOPICS)
    send_groups(log, "copy", range(30), 20)
    with running(log, run):
        for version in range(21):
            announce(log, version)
        send_groups(log, "add", range(30), 20)
        assert wait_for_batches(log, 1)[0].number == 20
    assert found(log, "dead-letters.rollouts.copy", "rollout") == []


def test_the_buffer_waits_for_no_version_in_a_run_that_is_no_fork():
    part = buffer.part(RUN)
    assert part.paused(part.config, part.initial()) == frozenset()


def test_code_that_no_longer_makes_the_parents_batches_is_found(
    parent: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    """Else the fork would take other rollouts along, and say nothing."""
    monkeypatch.setattr(BatchBuilder, "batch_is_due", lambda self: self.state.next_batch < 1)
    with pytest.raises(
        StreamrlError,
        match=(
            "^the journal of batcher of run small does not lead to its batch 2: the code has"
            " changed since"
        ),
    ):
        fork(parent)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.optimizer=muon", "goes on with the state of adamw"),
        ("learner.lora={rank: 8}", "are those of its adapters, or of a whole model"),
        ("model.tiny.hidden=64", "goes on with the weights of small"),
        ("model.tiny.alphabet=abc", "vocabulary and tokenizer stay"),
        ("model.max_seq_len=8", "goes on with the weights of small"),
        ("fork.version=3", "--as and --at say that"),
        ("run=x", "--as and --at say that"),
        ("learner.los=grpo", "did you mean 'loss'"),
    ],
)
def test_what_cannot_be_changed_is_refused(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        child_run_file(RUN, "other", [override])


def test_the_run_file_of_a_fork_is_a_run_file():
    run = child_run_file(RUN, "other", ["learner.learning_rate=0.5"]).model_copy(
        update={"fork": Fork(run="small", version=2, sha256="ab", balance={"": 1.5})}
    )
    assert run_file.parse(run.model_dump(mode="json")) == run
    assert changed(run, []) is run and run.learner.learning_rate == 0.5
    with pytest.raises(ConfigError, match=r"unknown key 'fork.versio'; did you mean 'version'\?"):
        changed(run, ["fork.versio=3"])


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
