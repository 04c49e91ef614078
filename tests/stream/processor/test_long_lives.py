"""What retention deletes while a part stands still or is slow: a start that says so, one that goes
on without it, and a replay from what is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher import process as batcher
from streamrl.batcher.state import BatcherState
from streamrl.buffer import process as buffer
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.first_batch import batcher_cut
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output, beginning_offset, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.processor import joiner, processor
from streamrl.stream.processor.definition import SNAPSHOT_EVENT_BYTES, Processor
from streamrl.stream.processor.journal import entries
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import Batch, Demand, Fate, JournalEntry, Snapshot
from streamrl.system.errors import InputGone
from tests.support import life
from tests.support.build import group, rollout
from tests.support.data_path import (
    RUN,
    TOPICS,
    announce,
    parts,
    publish,
    published,
    running,
    send_groups,
)
from tests.support.groups import scored_group
from tests.support.waiting import until

BOTH = ["copy", "add"]


def journal(log: MemoryLog, name: str, kind: type[Any]) -> list[Any]:
    return [
        record for _, record in entries(log, topology.journal(name)) if isinstance(record, kind)
    ]


def taken(log: MemoryLog, part: Processor[Any, Any]) -> bool:
    """Has the part taken everything that lies in its inputs? Each message of these tests is plain,
    so no marker lies behind the last.
    """
    last = journal(log, part.name, JournalEntry)
    positions = {
        (piece.topic, piece.partition): piece.end for entry in last for piece in entry.slices
    }
    return all(
        end_offset(log, topic, 0) <= positions.get((topic, 0), beginning_offset(log, topic, 0)) + 1
        for topic in part.inputs
    )


def live(
    log: MemoryLog,
    part: Processor[Any, Any],
    until: Callable[[], bool] | None = None,
    clock: Callable[[], float] = lambda: 1.0,
) -> None:
    """One life of a part, which is told to stop when it has taken all there is."""
    life.run_until(
        lambda stop: processor.run_processor(log, part, stop, clock),
        until or (lambda: taken(log, part)),
    )


def killed(log: MemoryLog, part: Processor[Any, Any]) -> None:
    """One life that ends without a word."""

    class Killed(Exception):
        pass

    def die(config: Any, state: Any) -> frozenset[str]:
        if taken(log, part):
            raise Killed
        return part.paused(config, state)

    with pytest.raises(Killed):
        processor.run_processor(log, replace(part, paused=die), threading.Event(), lambda: 1.0)


def expire_everything(log: MemoryLog) -> None:
    """What a week without the run does: nothing is left of the topics that have a retention."""
    kept = ("journal", "policy-versions")
    log.delete_before(
        {
            (topic, 0): end_offset(log, topic, 0)
            for topic in log.topics()
            if not topic.startswith(kept)
        }
    )


def run_of(*envs: str, **settings: Any) -> RunFile:
    raw = {"envs": {env: {"fraction": 1 / len(envs)} for env in envs}, "topics": settings}
    return run_file.parse(
        {**RUN.model_dump(include={"run", "buffer", "batcher", "model"}, exclude_unset=True), **raw}
    )


def chain(run: RunFile = RUN) -> tuple[MemoryLog, Processor[Any, Any], Processor[Any, Any]]:
    """Half groups and whole ones of two envs, taken by a buffer that was told to stop and a batcher
    of which a batch was too large.
    """
    log = MemoryLog({**TOPICS, "dead-letters.policy-versions": 1})
    announce(log, 0)
    for env in BOTH:
        send_groups(log, env, range(2), 0)
        send_groups(log, env, range(7, 9), 0, size=1)
    of_rollouts, of_groups = parts(run)
    return log, of_rollouts, of_groups


def test_a_part_that_was_told_to_stop_starts_again_when_retention_has_deleted_all_that_it_took():
    log, part, _ = chain()
    half = buffer.make_processor(run_of(*BOTH, on_removed="expire"))
    live(log, part)
    state = serialize_state(restore(log, part)[0].state)
    snapshots = journal(log, "buffer", Snapshot)
    assert len(snapshots) == 1  # at its end, although it has taken far fewer than snapshot_events
    # whole groups, which are over
    log.delete_before({("rollouts.copy", 0): 4, ("rollouts.add", 0): 4})
    fold, read = restore(log, part)
    assert (serialize_state(fold.state), read) == (state, 4)
    expire_everything(log)
    with pytest.raises(
        InputGone,
        match=(
            r"buffer: retention has deleted .* rollouts.add\[0\] below offset"
            r" 6.*topics.on_removed=expire"
        ),
    ):
        processor.run_processor(log, part, threading.Event())
    live(log, half, until=lambda: len(published(log, "fates", Fate)) == 4)
    fates = [
        (fate.fate, fate.environment, fate.offsets.tolist())
        for fate in published(log, "fates", Fate)
    ]
    assert sorted(fates) == [
        ("expired", "add", [4]),
        ("expired", "add", [5]),
        ("expired", "copy", [4]),
        ("expired", "copy", [5]),
    ]
    assert {fate.cause for fate in published(log, "fates", Fate)} == {
        "retention has deleted it before it was used"
    }
    assert restore(log, half)[0].state.windows["copy"].tokens == 0


def test_a_part_that_was_killed_before_is_told_which_way_is_left():
    log, part, _ = chain(run_of(*BOTH, on_removed="expire"))
    killed(log, part)
    assert journal(log, "buffer", Snapshot) == []
    expire_everything(log)
    with pytest.raises(
        InputGone,
        match=(
            r"buffer: .*after its last snapshot: rollouts.add\[0\] from offset 0, .*streamrl fork"
        ),
    ):
        processor.run_processor(log, part, threading.Event())


def test_a_snapshot_that_no_entry_names_yet_is_used_where_what_lies_before_it_is_deleted():
    log = chain()[0]
    part = replace(buffer.make_processor(RUN), snapshot_events=13)
    killed_in_pieces(log, part)  # its only snapshot is that of its last turn
    (snapshot,) = journal(log, "buffer", Snapshot)
    assert journal(log, "buffer", JournalEntry)[-1].snapshot_offset == -1
    state = serialize_state(restore(log, part)[0].state)
    log.delete_before({("rollouts.copy", 0): 4, ("rollouts.add", 0): 4})
    fold, _ = restore(log, part)
    assert (serialize_state(fold.state), fold.sequence) == (state, snapshot.sequence)


def test_a_snapshot_is_written_when_time_has_passed_although_nothing_comes():
    log, part, _ = chain()
    now = iter([1.0] * 20 + [1e6] * 10**6)  # a week later
    live(
        log, part, until=lambda: len(journal(log, "buffer", Snapshot)) == 1, clock=lambda: next(now)
    )
    # none more when it is told to stop: nothing has come since
    (snapshot,) = journal(log, "buffer", Snapshot)
    assert snapshot.sequence == journal(log, "buffer", JournalEntry)[-1].sequence


def test_the_batcher_lets_go_of_groups_that_are_deleted_and_goes_on():
    log, of_rollouts, of_groups = chain(run_of(*BOTH, on_removed="expire"))
    live(log, of_rollouts)
    live(log, of_groups)
    assert restore(log, of_groups)[0].state.queues["copy"].rollouts == 4
    expire_everything(log)
    live(
        log, of_groups, until=lambda: journal(log, "batcher", JournalEntry)[-1].removed is not None
    )
    state = restore(log, of_groups)[0].state
    assert (
        state.version,
        [(pool.tokens, pool.rollouts, pool.groups) for pool in state.queues.values()],
    ) == (0, [(0, 0, [])] * 2)
    announce(log, 1)
    for env in BOTH:
        send_groups(log, env, range(20, 30), 1)
    live(log, of_rollouts)
    live(log, of_groups)
    numbers = [record.number for record in found_from(log, "batches") if isinstance(record, Batch)]
    assert numbers[0] == 0 and len(numbers) >= 1
    for part in (of_rollouts, of_groups):
        result, fold = replay(log, part)
        assert result.difference == "" and result.begins_at > 0
        assert serialize_state(fold.state) == serialize_state(restore(log, part)[0].state)
    assert audit(log, run_of(*BOTH, on_removed="expire")).balanced


def test_groups_whose_rollouts_alone_are_deleted_end_the_batcher_or_expire():
    """It holds two groups and has not read others, and retention deletes what they refer to."""
    log, of_rollouts, of_groups = chain()
    live(log, of_rollouts)
    live(log, of_groups)
    for env in BOTH:
        send_groups(log, env, range(20, 23), 0)
    live(log, of_rollouts)
    log.delete_before(
        {(topic, 0): end_offset(log, topic, 0) for topic in ("rollouts.copy", "rollouts.add")}
    )
    with pytest.raises(InputGone, match=r"on_removed=expire"):
        live(log, of_groups)
    expiring = run_of(*BOTH, on_removed="expire")
    of_rollouts, of_groups = parts(expiring)
    killed(log, of_groups)  # It can be started again, although it has read what is deleted.
    live(log, of_groups)
    causes = {fate.cause for fate in published(log, "fates", Fate) if fate.fate == "expired"}
    assert causes == {
        "retention has deleted its group before it was used",
        "retention has deleted rollouts of its group before it was used",
    }
    announce(log, 1)
    for env in BOTH:
        send_groups(log, env, range(30, 40), 1)
    live(log, of_rollouts)
    live(log, of_groups)
    assert published(log, "batches", Batch)
    result, fold = replay(log, of_groups)
    assert result.difference == "" and result.begins_at > 0
    assert serialize_state(fold.state) == serialize_state(restore(log, of_groups)[0].state)
    assert audit(log, expiring).balanced


def test_a_group_that_refers_to_nothing_does_not_hinder_a_restart(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is a dead letter, and retention deletes rollouts of others. Then the batcher is killed."""
    monkeypatch.setattr(joiner, "IDLE_S", 0.0)
    log, of_rollouts, of_groups = chain(run_of(*BOTH, on_removed="expire"))
    live(log, of_rollouts)
    live(log, of_groups)
    record = scored_group(group("copy", "forged"))
    forged = structs.replace(record, offsets=np.array([10**6, 10**6 + 1], np.int64))
    publish(log, Output("groups.copy", "forged", forged))
    killed(log, of_groups)
    log.delete_before({("rollouts.copy", 0): 1})
    assert restore(log, of_groups)[0].offsets["groups.copy", 0] == end_offset(log, "groups.copy", 0)


def found_from(log: MemoryLog, topic: str) -> list[Any]:
    """Its records, from the first that retention has left."""
    return [to_event(message, ("batch",)).record for message in read(log, topic, 0)]


def test_a_topic_of_which_all_is_taken_and_deleted_is_no_loss():
    """A transaction's marker lies behind the last record: the position of the last entry is before
    it, and so before what retention has left.
    """
    log = MemoryLog({**TOPICS, "dead-letters.policy-versions": 1})
    part = buffer.make_processor(RUN)
    log.writer("source").commit(
        [to_message(Output("rollouts.copy", "g", rollout("copy", "g", i, 0))) for i in range(2)]
    )
    announce(log, 0)
    killed(log, part)
    live(log, part)
    log.delete_before({("rollouts.copy", 0): end_offset(log, "rollouts.copy", 0)})
    before = len(journal(log, "buffer", JournalEntry))
    announce(log, 1)
    live(log, part, until=lambda: len(journal(log, "buffer", JournalEntry)) > before)
    assert [entry.removed for entry in journal(log, "buffer", JournalEntry)][before:] == [None]


# ---- envs that come and go -----------------------------------------------------------------------


def test_an_env_is_taken_out_and_another_added_and_what_was_held_of_it_ends():
    log, of_rollouts, of_groups = chain()
    for part in (of_rollouts, of_groups):
        killed(log, part)  # so the next life folds what it took, under the settings of then
    for topic in (
        "rollouts.math",
        "groups.math",
        "dead-letters.rollouts.math",
        "dead-letters.groups.math",
    ):
        log.add(topic, 1)
    run = run_of("copy", "math")
    announce(log, 1)
    for env in ("copy", "math", "add"):  # of `add` nobody reads any more
        send_groups(log, env, range(20, 26), 1)
    for part in parts(run):
        live(log, part)
        result, fold = replay(log, part)
        assert result.difference == "" and result.begins_at == 0
        assert serialize_state(fold.state) == serialize_state(restore(log, part)[0].state)
    ended = [
        (f.fate, f.offsets.tolist(), f.cause)
        for f in published(log, "fates", Fate)
        if f.environment == "add"
    ]
    cause = "its env was taken out of the run"
    assert sorted(ended) == [
        ("filtered", [0, 1], cause),
        ("filtered", [2, 3], cause),
        ("filtered", [4], cause),
        ("filtered", [5], cause),
    ]
    batches = published(log, "batches", Batch)
    assert batches and all(batch.environments == ["copy", "math"] for batch in batches)
    assert audit(log, run).balanced


def test_what_an_env_owed_that_is_gone_goes_to_the_others():
    state = BatcherState(deficit={"copy": 61.0, "add": -61.0, "": 0.0}, short={"add": 3, "copy": 4})
    part = batcher.make_processor(run_of("copy"))
    after, outputs = batcher.reconcile(part.config, state, {}, 1.0)
    assert (after.deficit, after.short) == ({"copy": 0.0, "": 0.0}, {"copy": 4})
    # What is asked for is published, because the account of it begins again.
    asked = Demand(
        environment="copy", wanted_tokens=0, held_tokens=0, closed_groups={}, missing_tokens=4
    )
    assert outputs == [Output("demand", "copy", asked)]


# ---- journals ------------------------------------------------------------------------------------


def test_a_large_state_is_written_in_proportion_to_what_comes_in():
    """With a learner that is dead the buffer remembers every uid; a snapshot of them all every so
    many events would make the journal grow with its square.
    """
    part = replace(buffer.make_processor(RUN), snapshot_events=20)
    log = MemoryLog(TOPICS)
    announce(log, 0)
    sizes = list[int]()
    for start in range(0, 1200, 300):
        send_groups(log, "copy", range(start, start + 300), 0)
        killed_in_pieces(log, part)
        sizes.append(sum(len(record.state) for record in journal(log, "buffer", Snapshot)))
    grown = [after - before for before, after in pairwise(sizes)]
    assert (
        max(grown) <= 2 * SNAPSHOT_EVENT_BYTES * 600 and len(journal(log, "buffer", Snapshot)) >= 4
    )


def killed_in_pieces(log: MemoryLog, part: Processor[Any, Any]) -> None:
    """The part takes all there is, in turns of twenty, and ends without a word."""
    fold, _ = restore(log, part)
    writer = log.writer(part.name)
    reader = log.reader({(topic, 0): fold.offsets.get((topic, 0), 0) for topic in part.inputs})
    while messages := reader.poll(20, 0):
        process_batch(part, fold, messages, 1.0, writer.commit)


def test_on_a_broker_a_run_goes_on_without_what_was_deleted_and_with_other_envs(
    broker: str, run_name: str
):
    raw = RUN.model_dump(include={"buffer", "batcher", "model"}, exclude_unset=True)
    before = run_file.parse(
        {**raw, "run": run_name, "envs": {env: {"fraction": 0.5} for env in BOTH}}
    )
    after = run_file.parse(
        {
            **raw,
            "run": run_name,
            "envs": {env: {"fraction": 0.5} for env in ("copy", "math")},
            "topics": {"on_removed": "expire"},
        }
    )
    kafka = {"bootstrap.servers": broker}
    topic_changes.apply(before, kafka)
    log = KafkaLog(kafka, run_name)
    announce(log, 0)
    for env in BOTH:
        send_groups(log, env, range(2), 0)
        send_groups(log, env, range(7, 9), 0, size=1)
    with running(log, before):
        until(
            lambda: all(
                log.committed_offsets("batcher").get((topology.groups(env), 0), 0) >= 2
                for env in BOTH
            )
        )
        until(
            lambda: all(
                log.committed_offsets("buffer").get((topology.rollouts(env), 0), 0) >= 6
                for env in BOTH
            )
        )
    log.delete_before(
        {
            (topic, 0): end_offset(log, topic, 0)
            for topic in ("rollouts.copy", "rollouts.add", "groups.copy", "groups.add", "fates")
        }
    )
    topic_changes.apply(after, kafka)
    announce(log, 1)
    with running(log, after):
        for env in ("copy", "math"):
            send_groups(log, env, range(20, 30), 1)
        until(lambda: end_offset(log, "batches", 0) > beginning_offset(log, "batches", 0))
    for part in parts(after):
        result, fold = replay(log, part)
        assert (result.difference, fold.sequence) == ("", restore(log, part)[0].sequence)
    account = audit(log, after)
    assert account.balanced and account.total("batched") > 0


def test_a_fork_finds_the_batch_where_the_beginning_is_deleted():
    log = MemoryLog({**TOPICS, "dead-letters.policy-versions": 1})
    part = replace(batcher.make_processor(RUN), snapshot_events=10)
    for version in range(6):
        announce(log, version)
        for env in BOTH:
            send_groups(log, env, range(version * 5, version * 5 + 5), version)
        live(log, buffer.make_processor(RUN))
        live(log, part)
    whole = batcher_cut(log, RUN, 5)
    second = journal(log, "batcher", Snapshot)[1]
    log.delete_before(
        {
            (topic, partition): offset
            for topic, partition, offset in second.positions
            if topic.startswith("groups.")
        }
    )
    cut = batcher_cut(log, RUN, 5)
    assert whole.batch is not None and (cut.version, cut.balance, cut.held) == (
        whole.version,
        whole.balance,
        whole.held,
    )
    with pytest.raises(
        InputGone,
        match=(
            r"what batch 0 of run small was made of; the first that is there is \d+: fork without"
            r" --rollouts"
        ),
    ):
        batcher_cut(log, RUN, 0)
