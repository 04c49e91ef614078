"""Groups become one batch: which rollouts fit, and who trains on which rows."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.assemble import Sharding, assemble, drop_too_long, within_bytes
from streamrl.batcher.balance import loads
from streamrl.batcher.process import step
from streamrl.batcher.state import BatcherState
from streamrl.stream.log import chunks
from streamrl.stream.log.codec import encode
from streamrl.stream.records import Batch, Fate
from tests.support.batcher import CONFIG, arrivals, fates, forked, step_once
from tests.support.build import group, group_event, version_event


def test_a_rollout_longer_than_a_row_is_filtered_and_its_group_goes_on():
    out = step_once(
        [version_event(0), group_event(0, group(name="long", sizes=(9, 3))), *arrivals("b")]
    )
    assert fates(out)[0] == ("filtered", "long", None)
    state, _ = step(
        CONFIG,
        BatcherState(),
        [version_event(0), group_event(0, group(name="long", sizes=(9, 3)))],
        0.0,
    )
    assert state.queues["copy"].tokens == 5 and state.queues["copy"].rollouts == 1


def test_a_rollout_of_which_a_sequence_is_too_long_is_filtered_as_a_whole():
    out = step_once([version_event(0), group_event(0, forked("a", (3, 9, 2, 3), (0, 0, 1, 2)))])
    assert [(o.record.fate, o.record.uids) for o in out if isinstance(o.record, Fate)] == [
        ("filtered", ["a-0"])
    ]


def test_a_rollout_as_long_as_a_row_fits():
    whole = group(sizes=(9, 1))
    longest = int(whole.sequence_lengths.max())
    assert drop_too_long(whole, longest) == (whole, None)
    _, dropped = drop_too_long(whole, longest - 1)
    assert dropped is not None and dropped.uids == [whole.uids[0]]


def test_a_branch_at_another_offset_than_the_rest_of_its_rollout_is_filtered_with_it():
    """Which no buffer writes. The first sequence is too long, and the second branches from it."""
    torn = structs.replace(
        group(sizes=(9, 1, 2)),
        uids=["a", "a", "b"],
        branches_from=np.array([0, 1, 0], np.int32),
        branches_at=np.array([0, 1, 0], np.int32),
    )
    usable, dropped = drop_too_long(torn, 10)
    assert dropped is not None and dropped.uids == ["a", "a"] and usable.uids == ["b"]


def test_a_batch_says_for_how_many_processes_it_is():
    batch = assemble(
        [group("a", "ga", sizes=(6, 1, 1)), group("a", "gb", sizes=(4,))], 0, 0, 4, 8, Sharding(2)
    )
    assert batch is not None and batch.processes == 2
    # 8, 6, 3 and 3 tokens: 8 and 3 to process 0, 6 and 3 to process 1
    assert loads(batch, batch.prompt_lengths[batch.groups] + batch.lengths).tolist() == [11, 9]


def test_rows_that_cannot_be_divided_are_no_batch():
    with pytest.raises(ValueError, match="batch 7: 3 rows cannot be divided among 2 processes"):
        assemble([group()], 7, 7, row_count=3, max_seq_len=10, sharding=Sharding(2))


def test_experts_of_another_number_of_layers_are_unknown_in_the_batch():
    """What the first group has decides; a group without experts has unknown ones too: 0."""
    groups = [group(name=name, sizes=(3, 3), prompt=0) for name in "abc"]
    experts = np.arange(1, 13, dtype=np.uint8).reshape(6, 2, 1)
    groups[0] = structs.replace(groups[0], routed_experts=experts)
    groups[1] = structs.replace(groups[1], routed_experts=np.ones((6, 3, 1), np.uint8))
    batch = assemble(groups, 0, 0, row_count=6, max_seq_len=5)
    assert batch is not None and batch.routed_experts is not None
    assert batch.routed_experts.reshape(18, 2).tolist() == [
        *experts.reshape(6, 2).tolist(),
        *[[0, 0]] * 12,
    ]


def test_a_batch_has_as_many_groups_as_its_record_holds():
    """Groups of 10,000 tokens with an expert each: a column that the first two do not have, and
    that is filled in for them as soon as the third one is in the batch.
    """
    groups = [group(name=str(number), sizes=(5_000, 5_000), prompt=0) for number in range(5)]
    groups[2:] = [
        structs.replace(record, routed_experts=np.ones((10_000, 3, 1), np.uint8))
        for record in groups[2:]
    ]
    for count in range(1, 6):
        batch = assemble(groups[:count], 0, 0, row_count=10, max_seq_len=5_000)
        assert batch is not None
        # What a normalizer may add.
        size = len(encode(batch)) + 4 * 10_000 * count
        assert within_bytes(groups, size + 20_000) == count
        assert within_bytes(groups, size - 1) == max(count - 1, 1)


def test_groups_that_a_record_does_not_hold_wait_for_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
):
    """The budget takes two groups of 10 tokens, of some 400 bytes and what their names may have."""
    out = step_once(
        [
            version_event(0),
            *(group_event(i, group(name=f"g{i}", sizes=(3, 3))) for i in range(4)),
        ]
    )
    (both,) = [output.record for output in out if isinstance(output.record, Batch)]
    assert len(both.group_ids) == 2
    monkeypatch.setattr(chunks, "LARGE_RECORD_BYTES", 3_000)
    out = step_once(
        [
            version_event(0),
            *(group_event(i, group(name=f"g{i}", sizes=(3, 3))) for i in range(4)),
        ]
    )
    (one,) = [output.record for output in out if isinstance(output.record, Batch)]
    assert len(one.group_ids) == 1
    assert [fate for fate in fates(out) if fate[0] != "batched"] == []
