from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs

from streamrl.extensions.dashboard import index as indexes
from streamrl.extensions.dashboard import rollout_views
from streamrl.extensions.dashboard.index import (
    FATES,
    IN_FLIGHT,
    NAME_CHARS,
    Index,
    Query,
    RolloutLocation,
)
from streamrl.extensions.dashboard.state import new
from tests.extensions.dashboard.made import RUN, fate
from tests.support.build import rollout, turns


def filled(count: int = 6, limit: int = 100) -> Index:
    """Rollout i at offset 2 i, published at second i, by version i, with reward i."""
    index = Index(["copy", "add"], limit)
    for i in range(count):
        index.add(
            RolloutLocation("copy", 0, 2 * i),
            float(i),
            rollout("copy", f"g{i // 2}", i % 2, version=i, newest=i + 1, reward=float(i)),
            "",
        )
    return index


def uids(index: Index, *asked: object, **query: object) -> list[str]:
    return [index.uids[row] for row in index.select(Query(**query), *asked).rows.tolist()]  # type: ignore[arg-type]


def test_a_rollout_whose_sequences_share_more_tokens_than_a_column_holds_is_shown():
    asked, answered = turns()
    forks = [structs.replace(answered, fork=True, fork_at=2**31 - 1)] * 2
    index = Index(["copy"])
    failed = rollout("copy", failure="x", turns=[asked, *forks])
    index.add(RolloutLocation("copy", 0, 0), 0.0, failed, "")
    assert index.rows["tokens"].tolist() == [2**31 - 1]


def test_a_row_has_where_it_lies_and_what_to_find_it_by():
    index = filled(1)
    assert (
        index.place(0) == RolloutLocation("copy", 0, 0)
        and index.find(RolloutLocation("copy", 0, 0)) == 0
    )
    assert (
        index.find(RolloutLocation("copy", 0, 1)) is None
        and index.find(RolloutLocation("nobody", 3, 0)) is None
    )
    assert index.uids == ["g0-0"] and index.groups == ["g0"]
    row = index.rows[0]
    assert (row["oldest"], row["newest"], row["turns"], row["tokens"], row["sampled"]) == (
        0,
        1,
        2,
        5,
        3,
    )


def test_newest_first_and_other_orders():
    index = filled(3)
    assert uids(index) == ["g1-0", "g0-1", "g0-0"]
    assert uids(index, sort="oldest") == uids(index, sort="reward-low") == ["g0-0", "g0-1", "g1-0"]
    assert uids(index, sort="reward-high") == ["g1-0", "g0-1", "g0-0"]


def test_filters_together():
    index = filled()
    assert uids(index, version_min=2, version_max=4) == ["g2-0", "g1-1", "g1-0"]
    assert uids(index, reward_min=4.5) == ["g2-1"]
    assert uids(index, group="g1", text="-1") == ["g1-1"]
    assert uids(index, env="add") == [] and len(uids(index, env="copy")) == 6
    assert uids(index, env="one that there is not") == []


def test_a_fate_belongs_to_an_offset_and_has_a_step():
    index = filled()
    index.end(fate("batched", [2, 4], 1, 7), step=3)
    assert uids(index, fate="batched") == uids(index, batch=7) == ["g1-0", "g0-1"]
    # at the end of step 2 it had not come
    assert uids(index, 2, fate="batched") == uids(index, 2, batch=7) == []
    assert len(uids(index, fate=IN_FLIGHT)) == 4 and len(uids(index, 2, fate=IN_FLIGHT)) == 6
    assert [FATES[kind] for kind in index.fates(3)] == [
        IN_FLIGHT,
        "batched",
        "batched",
        *[IN_FLIGHT] * 3,
    ]


def test_as_it_was_has_only_what_was_published_then():
    assert uids(filled(), 1, 2.0) == ["g0-1", "g0-0"]


def test_a_fate_may_be_read_before_its_rollout():
    index = filled(1)
    index.end(fate("failed", [2], 1, None), step=1)
    index.add(RolloutLocation("copy", 0, 2), 1.0, rollout("copy", "g9"), "")
    assert uids(index, fate="failed") == ["g9-0"]


def test_a_record_that_is_read_twice_has_one_row():
    index = filled(2)
    index.add(RolloutLocation("copy", 0, 0), 9.0, rollout("copy", "again"), "")
    assert len(index.uids) == 2


def test_what_cannot_be_read_has_a_row_and_comes_last_by_reward():
    index = filled(2)
    index.add(RolloutLocation("copy", 0, 90), 5.0, None, "key")
    assert (
        index.uids[2] == "an unreadable record"
        and np.isnan(index.rows["reward"][2])
        and index.groups[2] == "key"
    )
    assert (
        uids(index, sort="reward-low")[-1]
        == uids(index, sort="reward-high")[-1]
        == "an unreadable record"
    )
    assert uids(index, reward_min=-1e9) == ["g0-1", "g0-0"]


@pytest.mark.parametrize("count", [8, 9, 50])
def test_memory_is_bounded_and_the_newest_stay(count: int):
    index = filled(count, limit=8)
    assert len(index.uids) == len(index.groups) == len(index.rows) <= 8
    assert index.place(int(index.select(Query()).rows[0])) == RolloutLocation(
        "copy", 0, 2 * (count - 1)
    )
    for row in range(len(index.uids)):
        assert index.find(index.place(row)) == row
    if count > 8:
        assert index.find(RolloutLocation("copy", 0, 0)) is None
        # of one that is forgotten: nothing to note, nothing kept
        index.end(fate("expired", [0], 0, None), step=0)
        index.add(RolloutLocation("copy", 0, 2 * count), 99.0, rollout("copy", "next"), "")
        assert index.fates()[-1] == FATES.index(IN_FLIGHT)


def test_a_uid_of_any_length_is_kept_in_part_and_its_group_is_found_by_its_whole_name():
    index = Index(["copy"])
    long = "g" * 100_000
    index.add(RolloutLocation("copy", 0, 0), 0.0, rollout("copy", long, 0), "")
    assert len(index.uids[0]) == len(index.groups[0]) == NAME_CHARS and index.uids[0].endswith("…")
    assert len(uids(index, group=long)) == len(uids(index, group=index.groups[0])) == 1


def test_the_texts_of_rollouts_are_bounded_in_bytes():
    index = Index(["copy"], limit=1_000, limit_bytes=20_000)
    for i in range(1_000):
        index.add(RolloutLocation("copy", 0, i), float(i), rollout("copy", f"{i:0150}", 0), "")
    assert len(index.uids) <= 50 and index.forgotten == 1_000 - len(index.uids)
    assert index.find(RolloutLocation("copy", 0, 999)) == len(index.uids) - 1


def test_fates_whose_rollouts_never_come_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(indexes, "EARLY", 10)
    index = filled(1)
    for offset in range(1, 100):
        index.end(fate("expired", [offset], 0, None), step=0)
    assert len(index._early) == 10  # pyright: ignore[reportPrivateUsage]


class Counting:
    """A lock that counts how often it was taken, and does something each time."""

    def __init__(self, done: Callable[[int], None] = lambda times: None) -> None:
        self.times = 0
        self._done = done

    def __enter__(self) -> None:
        self.times += 1
        self._done(self.times)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_question_holds_the_lock_for_a_piece_of_the_rollouts_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(indexes, "AT_ONCE", 10)
    index = filled(95)
    lock = Counting()
    sizes = list[int]()
    matching = index._matching  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        index, "_matching", lambda *asked: sizes.append(asked[-1] - asked[-2]) or matching(*asked)
    )
    found = index.select(Query(sort="reward-high"), lock=lock)
    assert lock.times == 10 and sizes == [*[10] * 9, 5]
    assert found.rows.tolist() == list(range(94, -1, -1)) and found.rewards.tolist() == [
        float(reward) for reward in range(94, -1, -1)
    ]


def test_rollouts_that_are_forgotten_while_somebody_looks_are_looked_for_again():
    state = new(RUN, limit=8)
    for i in range(8):
        state.index.add(RolloutLocation("copy", 0, i), float(i), rollout("copy", f"g{i}"), "")

    def one_more(times: int) -> None:
        if times == 2:  # between the question and its answer the oldest two are forgotten
            state.index.add(RolloutLocation("copy", 0, 8), 8.0, rollout("copy", "g8"), "")

    found = rollout_views.page(state, Query(), lock=Counting(one_more))
    assert [row["uid"] for row in found["rows"]] == [f"g{i}-0" for i in range(8, 1, -1)]
    assert found["total"] == found["kept"] == 7 and found["forgotten"] == 2


def test_a_number_that_no_column_holds_ends_nothing():
    index = Index(["copy"])
    index.add(RolloutLocation("copy", 0, 0), 0.0, rollout("copy", "g", 0), "")
    index.end(fate("batched", [0], 1, 2**40), step=2**40)
    assert uids(index, fate="batched") == ["g-0"] and index.rows["batch"][0] == 2**31 - 1
