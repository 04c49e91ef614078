"""Groups without advantages are left out by the buffer, and the batcher fills its batch with
others: both steps, one after the other.
"""

from __future__ import annotations

from dataclasses import replace

from streamrl.batcher import process as batcher
from streamrl.batcher.state import BatcherState
from streamrl.buffer import process as buffer
from streamrl.buffer.groups import join_rollouts, rollout_of
from streamrl.buffer.state import BufferState
from streamrl.stream.records import Batch, Demand, ScoredGroup
from tests.support.batcher import CONFIG
from tests.support.buffer import CONFIG as BUFFER
from tests.support.buffer import fates, step_once
from tests.support.build import group_event, rollout, rollout_event, version_event

REWARDS = {"a": (1.0, 0.0), "flat": (0.5, 0.5), "b": (0.0, 1.0), "c": (1.0, 0.0)}


def test_a_batch_is_filled_with_groups_that_teach_something():
    """Groups of 10 tokens, batches of 20. The one whose rewards are equal comes to its end, its env
    is credited, and is asked for another.
    """
    events = [
        rollout_event(2 * i + j, rollout(group=name, sample=j, reward=reward))
        for i, (name, rewards) in enumerate(REWARDS.items())
        for j, reward in enumerate(rewards)
    ]
    scored = step_once([version_event(0), *events], replace(BUFFER, zero_advantage="filter"))
    assert fates(scored) == [("filtered", [2, 3], "group whose advantages are all 0")]
    rollouts = {event.offset: rollout_of(event) for event in events}
    groups = [
        join_rollouts(record, [rollouts[offset] for offset in record.offsets.tolist()])
        if record.uids
        else record
        for output in scored
        if isinstance(record := output.record, ScoredGroup)
    ]
    assert [(g.group_id, len(g.uids)) for g in groups] == [
        ("a", 2),
        ("flat", 0),
        ("b", 2),
        ("c", 2),
    ]

    state, told = batcher.step(
        CONFIG,
        BatcherState(),
        [version_event(0), *(group_event(i, g) for i, g in enumerate(groups[:2]))],
        0.0,
    )
    demand = [output.record for output in told if isinstance(output.record, Demand)][-1]
    # two batches, less the group that counts and half of one that would be too old
    assert (demand.held_tokens, demand.wanted_tokens, demand.closed_groups) == (
        10,
        25,
        {"copy-0": 2},
    )
    _, made = batcher.step(
        CONFIG, state, [group_event(2 + i, g) for i, g in enumerate(groups[2:])], 0.0
    )
    (batch,) = [output.record for output in made if isinstance(output.record, Batch)]
    assert batch.group_ids == ["a", "b"] and batch.advantages.all()


def test_by_default_they_train_and_are_counted_either_way():
    for choice in ("keep", "filter"):
        config = replace(BUFFER, zero_advantage=choice)
        flat = [rollout_event(i, rollout(group="flat", sample=i, reward=0.5)) for i in range(2)]
        state, out = buffer.step(config, BufferState(), [version_event(0), *flat], 0.0)
        assert [len(o.record.uids) for o in out if isinstance(o.record, ScoredGroup)] == [
            2 if choice == "keep" else 0
        ]
        assert (
            state.windows["copy"].intake.metrics("copy")["replays/copy/zero_advantage_groups"] == 1
        )
