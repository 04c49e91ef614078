"""What the batcher holds of its envs, worked by hand: groups of two rollouts, 2 + 3 tokens each."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.selection import Candidate
from streamrl.batcher.state import EnvQueue, HeldGroup, held_group, on_policy_rollouts
from tests.support.build import group, group_event


def held(number: int, version: int) -> HeldGroup:
    record = group(name=f"g{number}", version=version)
    return held_group(group_event(number, record), record)


def test_a_held_group_knows_its_tokens_its_rollouts_and_who_sampled_them():
    """The first rollout is of version 1 alone, the second went on across the update."""
    record = structs.replace(
        group(name="g", version=1),
        oldest_versions=np.array([1, 0], np.int32),
    )
    mixed = held_group(group_event(0, record), record)
    assert (mixed.tokens, mixed.rollouts) == (10, 2)
    assert (mixed.oldest, mixed.newest, mixed.of_newest) == (0, 1, 1)
    assert on_policy_rollouts([mixed, held(1, 1), held(2, 0)], 1) == 1 + 2


def test_the_oldest_group_is_offered_first_and_one_of_a_version_to_come_not_at_all():
    queue = EnvQueue()
    for number, version in enumerate((1, 0, 1, 2)):
        queue.add(held(number, version), announced=1)
    assert [found.event.offset for found in queue.groups] == [1, 0, 2]
    assert [found.event.offset for found in queue.ahead] == [3]
    assert queue.candidate("copy", 0) == Candidate("copy", 0, 10)
    assert queue.candidate("copy", 2) == Candidate("copy", 2, 10)
    assert queue.candidate("copy", 3) is None


@pytest.mark.parametrize(
    ("asked_tokens", "order"),
    [(50, [0, 1, 2, 3]), (40, [0, 1, 2, 3]), (39, [1, 2, 3, 0]), (20, [2, 3, 1, 0])],
)
def test_groups_beyond_those_that_were_asked_for_come_last_and_the_newest_of_them_first(
    asked_tokens: int, order: list[int]
):
    queue = EnvQueue()
    for number in range(4):
        queue.add(held(number, version=number), announced=3)
    first = queue.first_asked(asked_tokens)
    offered = [queue.candidate("copy", number, first) for number in range(5)]
    assert [candidate and candidate.position for candidate in offered] == [*order, None]


def test_what_is_held_is_counted_and_what_can_be_used_is_less():
    queue = EnvQueue(tokens=20, rollouts=4)
    queue.add(held(0, 0), announced=0)
    queue.add(held(1, 1), announced=0)
    assert queue.usable_tokens == 10
    assert queue.remove(queue.groups, 0).event.offset == 0
    assert (queue.tokens, queue.rollouts, queue.usable_tokens) == (10, 2, 0)


def test_what_a_group_costs_is_what_the_last_few_hundred_have_cost():
    pool = EnvQueue(measured=100_000, measured_tokens=100_000 * 8)
    for _ in range(3 * 256):
        pool.measure(40)
    assert pool.measured == 256 and 37 < pool.group_tokens <= 40


def test_the_producers_that_are_counted_are_those_of_which_a_group_has_ended_last(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("streamrl.batcher.state.COUNTED_PRODUCERS", 3)
    queue = EnvQueue(granted={"copy-0": 2})
    for producer in ("copy-0", "a", "b", "a", "c", "d"):
        queue.count_closed(structs.replace(group(sizes=()), producer=producer))
    assert queue.closed == {"copy-0": 1, "c": 1, "d": 1}
