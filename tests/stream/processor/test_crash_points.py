"""The real buffer and batcher, killed between any two operations of the loop, come out where
undisturbed ones do: state, outputs, each output once.

What they are given is generated: versions, groups of two envs over two partitions, late and doubled
rollouts, failures, rubbish, wrong keys, null records; and so is the schedule, that is which records
each turn takes. A life after a kill follows the same schedule from where it stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from streamrl.config import topology
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Event, Message, TopicPartition
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import Batch, Fate
from streamrl.system.errors import StreamrlError
from tests.support.groups import joined
from tests.support.inputs import (
    DEFECTS,
    ENVS,
    Schedule,
    Sent,
    log_of,
    mixed_inputs,
    real_parts,
    schedule_of,
    version_message,
)


class Killed(Exception):
    """The process is gone."""


# ---- inputs --------------------------------------------------------------------------------------


sent = some.builds(
    Sent,
    env=some.sampled_from(ENVS),
    group=some.integers(0, 5),
    sample=some.integers(0, 2),
    version=some.integers(0, 4),
    ahead=some.sampled_from((0, 0, 0, 1, 9)),
    defect=some.sampled_from(DEFECTS),
).map(Sent.message)
versions = some.builds(
    version_message, some.integers(0, 5), some.sampled_from(("lead", "lead", "lead", "second"))
)
inputs = some.lists(some.one_of(sent, sent, sent, versions), min_size=5, max_size=60)
cuts = some.lists(some.integers(1, 7), min_size=1, max_size=6)
orders = some.randoms(use_true_random=False)


# ---- lives ---------------------------------------------------------------------------------------


def live(
    log: MemoryLog, part: Processor[Any, Any], schedule: Schedule, die_at: int = -1
) -> tuple[ProcessorState[Any, Any], int]:
    """One life, from its start to the end of the schedule; dies at operation `die_at`. Returns
    where it is and how many operations it took.
    """
    operations = itertools.count()

    def alive() -> None:
        if next(operations) == die_at:
            raise Killed

    def step(*arguments: Any) -> Any:
        alive()  # in a restart too, between two entries folded again
        result = part.step(*arguments)
        alive()
        return result

    def commit(messages: Sequence[Message]) -> int:
        alive()
        offset = writer.commit(messages)
        alive()
        return offset

    writer = log.writer(part.name)
    alive()
    me = replace(part, step=step)
    fold, _ = restore(log, me)
    alive()
    for number in range(fold.sequence + 1, len(schedule)):
        messages: list[Message] = []
        positions = dict(fold.offsets)
        for where, count in schedule[number]:
            more, positions[where] = log.take(where, positions.get(where, 0), count)
            messages += more
        alive()
        process_batch(me, fold, joined(log, part, messages), 100.0 + number, commit)
    return fold, next(operations)


def outputs(log: MemoryLog) -> dict[TopicPartition, list[tuple[bytes | None, bytes | None]]]:
    """Everything that was written and committed, but for the journals: how often they hold a
    snapshot is their own business.
    """
    where = [
        (topic, p)
        for topic, n in log.topics().items()
        for p in range(n)
        if not topic.startswith("journal.")
    ]
    return {w: [(m.key, m.value) for m in log.take(w, 0, 10**6)[0]] for w in where}


Points = Callable[[int], Sequence[int]]  # of so many operations, at which to die


def check(
    messages: Sequence[Message],
    sizes: Sequence[int],
    order: Any,
    parts: Sequence[Processor[Any, Any]],
    points: Points,
) -> int:
    """Kill each part at the points chosen, all others undisturbed. Returns how often somebody was
    killed.
    """
    undisturbed = log_of(messages)
    schedules = list[Schedule]()
    expected = list[bytes]()
    killed = 0
    operations: list[int] = []
    for part in parts:
        schedules.append(schedule_of(undisturbed, part, sizes, order))
        fold, count = live(undisturbed, part, schedules[-1])
        expected.append(serialize_state(fold.state))
        operations.append(count)
    everything = outputs(undisturbed)
    for victim, die_at in ((v, p) for v in range(len(parts)) for p in points(operations[v])):
        log = log_of(messages)
        for index, (part, schedule) in enumerate(zip(parts, schedules, strict=True)):
            if index == victim:
                killed += dies(log, part, schedule, die_at)
                # perhaps while it is starting again
                killed += dies(log, part, schedule, die_at // 2)
            fold, _ = live(log, part, schedule)
            assert serialize_state(fold.state) == expected[index], f"{part.name} killed at {die_at}"
            assert serialize_state(restore(log, part)[0].state) == expected[index], (
                f"{part.name} after its end"
            )
        assert outputs(log) == everything, f"{parts[victim].name} killed at {die_at}"
    return killed


def dies(log: MemoryLog, part: Processor[Any, Any], schedule: Schedule, at: int) -> bool:
    try:
        live(log, part, schedule, at)
    except Killed:
        return True
    return False


# ---- tests ---------------------------------------------------------------------------------------


@settings(
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(inputs, cuts, orders, some.integers(1, 30), some.integers(0, 2**16))
def test_wherever_a_part_is_killed_it_ends_where_an_undisturbed_one_does(
    messages: list[Message], sizes: list[int], order: Any, snapshot_events: int, seed: int
):
    def few(count: int) -> Sequence[int]:
        return np.random.default_rng(seed).integers(0, count, 6).tolist()

    check(messages, sizes, order, real_parts(snapshot_events), few)


@pytest.mark.parametrize(("snapshot_events", "every"), [(1, 5), (17, 1), (10**6, 5)])
def test_every_point_of_a_busy_run(snapshot_events: int, every: int):
    killed = check(
        mixed_inputs(),
        [5, 1, 9],
        Random(7),
        real_parts(snapshot_events),
        lambda count: range(0, count, every),
    )
    assert killed > 200 / every


def test_the_busy_run_has_everything_in_it_and_each_output_once():
    log = log_of(mixed_inputs())
    for part in real_parts(17):
        live(log, part, schedule_of(log, part, [5, 1, 9], Random(7)))
    fates = [
        event.record for event in events(log, "fates", "fate") if isinstance(event.record, Fate)
    ]
    assert {fate.fate for fate in fates} == {
        "batched",
        "expired",
        "filtered",
        "duplicate",
        "failed",
        "invalid",
    }
    places = [
        (fate.environment, fate.partition, offset)
        for fate in fates
        for offset in fate.offsets.tolist()
    ]
    assert len(places) == len(set(places)) > 60
    numbers = [
        event.record.number
        for event in events(log, "batches", "batch")
        if isinstance(event.record, Batch)
    ]
    assert numbers == list(range(len(numbers))) and len(numbers) >= 3
    groups = [
        (env, event.key)
        for env in ENVS
        for event in events(log, topology.groups(env), "scored-group")
    ]
    assert len(groups) == len(set(groups)) > 20


def events(log: MemoryLog, topic: str, schema: str) -> list[Event]:
    return [
        to_event(m, (schema,))
        for p in range(log.topics()[topic])
        for m in log.take((topic, p), 0, 10**6)[0]
    ]


def test_a_part_that_keeps_something_beside_its_state_is_found():
    def step(*arguments: Any) -> Any:
        state, made = real.step(*arguments)
        return state, made[next(beside) % 3 :]

    real = real_parts(17)[0]
    beside = itertools.count()
    with pytest.raises((AssertionError, StreamrlError), match=r"killed at|outputs that differ"):
        check(
            mixed_inputs(),
            [5, 1, 9],
            Random(7),
            [replace(real, step=step)],
            lambda count: range(count - 8, count),
        )
