from __future__ import annotations

from streamrl.batcher.assemble import assemble
from streamrl.extensions.recordings.inheritance import GroupIndex, next_problem
from tests.support.build import group, rollout


def index_of(*rollouts: object) -> GroupIndex:
    index = GroupIndex()
    for record in rollouts:
        index.add_rollout(record)  # type: ignore[arg-type]
    return index


def test_a_fork_has_what_batch_k_may_take():
    """At version 5 with max_age 2: versions 3 to 5, and of a group with any such member all
    of it.
    """
    index = index_of(*(rollout("copy", f"g{version}", version=version) for version in range(8)))
    assert [name for _, name in index.inherited(5, max_age=2)] == ["g3", "g4", "g5"]
    assert [name for _, name in index.inherited(5, max_age=0)] == ["g5"]
    mixed = index_of(rollout("copy", "g", 0, version=1), rollout("copy", "g", 1, version=4))
    assert list(mixed.inherited(5, max_age=1)) == [("copy", "g")]


def test_what_a_later_version_helped_to_sample_stays_with_the_parent():
    index = index_of(
        rollout("copy", "g", 0, version=5), rollout("copy", "g", 1, version=5, newest=6)
    )
    assert list(index.inherited(5, 2)) == [] and list(index.inherited(6, 2)) == [("copy", "g")]


def test_what_an_earlier_batch_was_trained_on_is_over():
    """Group ids are an env's own: the same one of another env is another group."""
    index = index_of(*(rollout(env, name) for env in ("copy", "add") for name in ("g0", "g1")))
    batch = assemble([group("copy", "g0"), group("add", "g1")], 0, 0, row_count=2, max_seq_len=16)
    assert batch is not None
    index.add_batch(batch)
    assert list(index.inherited(0, 0)) == [("copy", "g1"), ("add", "g0")]


def test_a_group_of_failures_is_nothing_to_begin_with():
    index = index_of(
        rollout("copy", "g", 0, failure="no server"),
        rollout("copy", "h", 0, failure="no server"),
        rollout("copy", "h", 1),
    )
    assert list(index.inherited(0, 0)) == [("copy", "h")]
    assert index.producers["copy", "g"] == "copy-0"


def test_problems_go_on_behind_those_of_all_replicas():
    """Two replicas stood at 6 and 5. As many again: 6 is the first one's, 7 the second's. Three: 6,
    7, 8. One: 6.
    """
    assert [next_problem([6, 5], i, 2) for i in range(2)] == [6, 7]
    assert [next_problem([7, 5], i, 3) for i in range(3)] == [9, 7, 8]
    assert next_problem([6, 5], 0, 1) == 6
    assert [next_problem([], i, 2) for i in range(2)] == [0, 1]
