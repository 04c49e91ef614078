from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from streamrl.config import topology
from streamrl.extensions.recordings.audit import Audit, audit
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.processor.processor import run_processor
from streamrl.stream.records import Fate, Rollout, ScoredGroup
from tests.support import life
from tests.support.data_path import (
    RUN,
    TOPICS,
    announce,
    parts,
    play,
    publish,
    published,
    running,
    send_groups,
)
from tests.support.waiting import until


def account(log: MemoryLog) -> Audit:
    return audit(log, RUN)


@pytest.fixture
def recording() -> MemoryLog:
    log = MemoryLog(TOPICS)
    play(log)
    return log


def test_published_is_the_sum_of_the_fates(recording: MemoryLog):
    result = account(recording)
    assert result.balanced and result.problems == []
    assert result.published == 2 * 4 * 5 * 2
    assert result.total("batched") == sum(result.batches.values()) == result.published
    assert result.total("in flight") == 0
    # version 3 is announced
    assert result.trained == sum(
        rollouts for batch, rollouts in result.batches.items() if batch < 3
    )
    assert result.trained_on == {1: 0, 2: 1, 3: 2}
    assert {
        batch: versions.total() for batch, versions in result.sampled_by.items()
    } == result.batches
    assert result.sampled_by[0].keys() == {0} and all(
        batch - min(versions) <= RUN.buffer.max_age for batch, versions in result.sampled_by.items()
    )
    assert max(result.ages) <= RUN.buffer.max_age


def test_a_rollout_that_nobody_has_read_yet_is_in_flight(recording: MemoryLog):
    before = account(recording)
    publish(recording, *_rollout_outputs("late"))
    after = account(recording)
    assert after.balanced and after.total("in flight") == before.total("in flight") + 1


def test_a_deleted_fate_is_named(recording: MemoryLog):
    messages = recording._partitions["fates", 0]
    index = next(i for i, message in enumerate(messages) if message is not None)
    messages[index] = None
    result = account(recording)
    assert not result.balanced and result.lost == 2
    assert (
        result.problems[0].endswith("has no fate, and no part holds it")
        and "-0 at rollouts." in result.problems[0]
    )


def test_a_doubled_fate_is_named(recording: MemoryLog):
    publish(
        recording,
        Output(
            "fates",
            "x",
            Fate(
                fate="expired",
                environment="copy",
                partition=0,
                offsets=np.array([0]),
                uids=["copy-0-0"],
            ),
        ),
    )
    result = account(recording)
    assert result.repeated == 1 and result.problems == [
        "copy-0-0 at rollouts.copy[0]@0 has a second fate: expired"
    ]


def test_a_fate_that_points_nowhere_is_named(recording: MemoryLog):
    publish(
        recording,
        Output(
            "fates",
            "x",
            Fate(
                fate="expired",
                environment="copy",
                partition=0,
                offsets=np.array([10_000]),
                uids=["ghost"],
            ),
        ),
    )
    result = account(recording)
    assert (
        result.dangling == 1
        and "ghost points at rollouts.copy[0]@10000, where no rollout is" in result.problems[0]
    )


def test_rubbish_is_accounted_for_too():
    log = MemoryLog(TOPICS)
    writer = log.producer()
    writer.send(Message("rollouts.copy", b"g", b"\xc1", (("schema", b"rollout/1"),)))
    play(log)
    result = account(log)
    assert result.balanced and result.counts["copy", -1] == {"invalid": 1}


def retained(source: MemoryLog, starts: dict[tuple[str, int], int]) -> MemoryLog:
    """A copy of a log whose beginning is deleted, as retention does it."""
    log = MemoryLog(source.topics())
    for topic, partitions in source.topics().items():
        for partition in range(partitions):
            log._partitions[topic, partition] = list(source._partitions[topic, partition])
    log.delete_before(starts)
    return log


def test_rollouts_that_retention_has_deleted_are_gone_and_neither_astray_nor_lost(
    recording: MemoryLog,
):
    kept = retained(recording, {("rollouts.copy", 0): 4})
    before = account(recording)
    after = account(kept)
    deleted = sum(message is not None for message in recording._partitions["rollouts.copy", 0][:4])
    assert after.balanced and after.problems == []
    assert (after.published, after.gone) == (before.published - deleted, deleted)


def test_rollouts_whose_fates_retention_has_deleted_are_gone_and_not_lost(recording: MemoryLog):
    messages = recording._partitions["fates", 0]
    last = max(offset for offset, message in enumerate(messages) if message is not None)
    result = account(retained(recording, {("fates", 0): last}))
    left = messages[last]
    assert left is not None
    (kept,) = [
        event.record for event in [to_event(left, ("fate",))] if isinstance(event.record, Fate)
    ]
    assert result.balanced and result.total("in flight") == account(recording).total("in flight")
    assert result.published == len(kept.offsets) + result.total("in flight")
    assert result.gone == account(recording).published - result.published


def _rollout_outputs(group: str) -> list[Output]:
    from tests.support.build import rollout

    return [Output("rollouts.copy", group, rollout("copy", group, 0, 3))]


def test_rollouts_whose_groups_retention_deleted_before_they_were_used_are_accounted_for():
    """The batcher was away: it holds some groups, and has not read four others. Their rollouts are
    all in the log.
    """
    log = MemoryLog(TOPICS)
    play(log)
    held = account(log).total("in flight")
    known = len(published(log, "groups.copy", ScoredGroup))
    send_groups(log, "copy", range(100, 104), 3)
    life.run_until(
        lambda stop: run_processor(log, parts()[0], stop),
        lambda: len(published(log, "groups.copy", ScoredGroup)) == known + 4,
    )
    assert account(log).total("in flight") == held + 8
    for env in RUN.envs:
        place = topology.groups(env), 0
        log.delete_before({place: log.end_offsets([place])[place]})
    stop = threading.Event()
    stop.set()
    run_processor(log, replace(parts()[1], expires_removed=True), stop)
    result = account(log)
    assert result.balanced and result.problems == []
    assert result.gone == 8
    assert result.total("in flight") == 0


def test_the_tokens_of_fates_and_in_flight_are_those_of_all_rollouts(recording: MemoryLog):
    before = len(published(recording, "fates", Fate))
    announce(recording, 20)
    send_groups(recording, "copy", range(100, 103), version=0)  # too old
    with running(recording):
        until(lambda: len(published(recording, "fates", Fate)) >= before + 3)
    send_groups(recording, "copy", range(200, 202), version=20)  # not read by any part
    result = account(recording)
    assert result.total_tokens("in flight") == 2 * 2 * 3
    fates = Counter[str]()
    for fate in published(recording, "fates", Fate):
        assert fate.tokens is not None
        fates[fate.fate] += int(fate.tokens.sum())
    assert len(fates) > 1 and {kind: result.total_tokens(kind) for kind in fates} == fates
    sampled = sum(
        rollout.sampled_tokens
        for env in RUN.envs
        for rollout in published(recording, topology.rollouts(env), Rollout)
    )
    assert sampled == fates.total() + result.total_tokens("in flight")
