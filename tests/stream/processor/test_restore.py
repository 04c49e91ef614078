"""A restart reads what the part holds and what it took since its last snapshot: counted here, timed
in bench/restart.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import run_file
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.joiner import joiner_of
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import Rollout
from tests.support.build import group, rollout, version_event
from tests.support.data_path import TOPICS
from tests.support.groups import group_message

RUN = run_file.parse(
    {
        "run": "window",
        "envs": {"copy": {"fraction": 1.0}},
        "buffer": {"group_size": 2, "max_age": 2},
        "batcher": {"total_token_budget": 80, "max_seq_len": 10},
        "model": {"max_seq_len": 10},
    }
)
SNAPSHOT_EVENTS = 500
TURN_EVENTS = 64


def sent(record: Rollout) -> Message:
    return to_message(Output("rollouts.copy", record.group_id, record))


def announced(version: int) -> Message:
    return to_message(Output("policy-versions", "lead", version_event(version).record))


def live(
    log: MemoryLog, part: Processor[Any, Any], messages: Sequence[Message]
) -> ProcessorState[Any, Any]:
    """The part after it has taken these messages, in their order."""
    joiner = joiner_of(log, part)
    writer = log.writer(part.name)
    fold = ProcessorState(part.initial())
    for start in range(0, len(messages), TURN_EVENTS):
        appended = log.append(messages[start : start + TURN_EVENTS], marker=True)
        joined = joiner.join(appended) if joiner else appended
        process_batch(part, fold, joined, 1.0, writer.commit)
    return fold


def part_and_past(log: MemoryLog, room: str) -> tuple[Processor[Any, Any], list[Message], int]:
    """A part, some 6,000 records that are over and 300 that it holds, and how many it holds."""
    if room == "buffer":  # a straggler from the very beginning, 3,000 whole groups, 299 halves
        past = [rollout("copy", f"g{i // 2}", i % 2) for i in range(6000)]
        records = [
            rollout("copy", "first", 0),
            *past,
            *(rollout("copy", f"open{i}", 0) for i in range(299)),
        ]
        return buffer.make_processor(RUN), [announced(0), *map(sent, records)], 300
    past = [
        m
        for version in range(700)
        for m in (
            announced(version),
            *(group_message(log, group(name=f"g{version}-{i}", version=version)) for i in range(8)),
        )
    ]
    return (
        batcher.make_processor(RUN),
        [*past, *(group_message(log, group(name=f"held{i}", version=699)) for i in range(300))],
        300,
    )


@pytest.mark.parametrize("room", ["buffer", "batcher"])
def test_a_restart_reads_no_more_than_the_window(room: str):
    log = MemoryLog(TOPICS)
    original, messages, held = part_and_past(log, room)
    part = replace(original, snapshot_events=SNAPSHOT_EVENTS)
    fold = live(log, part, messages)
    steps = 0

    def step(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return original.step(*arguments)

    again, records_read = restore(log, replace(part, step=step))
    assert serialize_state(again.state) == serialize_state(fold.state)
    assert len(messages) > 6000 and held <= records_read <= held + SNAPSHOT_EVENTS + 2 * TURN_EVENTS
    assert steps <= SNAPSHOT_EVENTS // TURN_EVENTS + 2


def test_a_snapshot_counts_from_the_moment_it_is_written():
    """A part that dies before the entry that names its snapshot does not take another one at its
    next turn, and again, and again.
    """
    part = replace(buffer.make_processor(RUN), snapshot_events=10)
    # one turn, which ends with a snapshot
    log = MemoryLog(TOPICS)
    messages = [announced(0), *(sent(rollout("copy", f"g{i}", 0)) for i in range(40))]
    fold = live(log, part, messages)
    again, _ = restore(log, part)
    assert (
        again.events_since_snapshot == fold.events_since_snapshot == 0
        and again.snapshot_offset == fold.snapshot_offset == 0
    )
