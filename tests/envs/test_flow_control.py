from __future__ import annotations

from streamrl.envs.flow_control import Counter, Credit, resumed
from streamrl.records import Demand, EnvProgress


def demand(wanted: int, closed: int = 0) -> Demand:
    return Demand(
        environment="copy",
        wanted_tokens=wanted,
        held_tokens=0,
        closed_groups={"copy-0": closed, "copy-1": 99},
    )


def launches(credit: Credit) -> int:
    before = credit.launched
    while credit.allows():
        credit.launched += 1
    return credit.launched - before


def test_without_a_demand_nothing_is_launched():
    assert launches(Credit("copy-0", 1, 10.0)) == 0


def test_what_is_outstanding_stays_within_what_is_wanted():
    credit = Credit("copy-0", 1, 10.0, demand(35))
    assert launches(credit) == 4  # 0, 10, 20, 30 tokens outstanding are less than 35
    credit.demand = demand(35, closed=3)
    assert credit.outstanding == 1 and launches(credit) == 3


def test_replicas_share_it():
    assert [
        launches(
            Credit(
                f"copy-{i}",
                2,
                10.0,
                Demand(environment="copy", wanted_tokens=40, held_tokens=0, closed_groups={}),
            )
        )
        for i in (0, 1)
    ] == [2, 2]


def test_the_size_of_a_group_is_measured():
    credit = Credit("copy-0", 1, 1000.0)
    assert credit.group_tokens == 1000
    credit.measured(30)
    credit.measured(50)
    assert credit.group_tokens == 40


def test_a_size_that_changes_is_followed():
    """A policy whose answers grow from 8 to 40 tokens: after three times as many groups as are
    remembered, the old ones are forgotten.
    """
    credit = Credit("copy-0", 1, 1000.0)
    for _ in range(100_000):
        credit.measured(8)
    for _ in range(3 * 256):
        credit.measured(40)
    assert 38 < credit.group_tokens <= 40


def test_replica_i_of_n_takes_every_nth_problem():
    counters = [Counter(EnvProgress(producer=f"copy-{i}", next_problem=i), 3) for i in range(3)]
    assert [[counter.take() for _ in range(3)] for counter in counters] == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 8],
    ]


def test_progress_is_what_is_published_and_what_is_open():
    counter = Counter(EnvProgress(producer="copy-0", next_problem=0), 2)
    for _ in range(3):
        counter.take()
    assert counter.done([2]) == EnvProgress(
        producer="copy-0", next_problem=6, open_problems=[0, 4], published_groups=1
    )


def test_another_number_of_replicas_begins_behind_all_that_was_posed():
    """Two replicas at 100 and 51 become three, in any order, then two again; whoever starts meets
    no number that another has had.
    """
    two = [
        EnvProgress(producer="x-0", next_problem=100, replicas=2),
        EnvProgress(producer="x-1", next_problem=51, open_problems=[49], replicas=2),
    ]
    first = resumed("x-1", 1, 3, two)
    assert first == EnvProgress(
        producer="x-1", next_problem=100, open_problems=[49], replicas=3, begins=100
    )
    went_on = EnvProgress(producer="x-1", next_problem=130, replicas=3, begins=100)
    assert resumed("x-2", 2, 3, [two[0], went_on]).next_problem == 101
    assert resumed("x-0", 0, 3, [two[0], went_on]).next_problem == 102
    three = [
        EnvProgress(producer=f"x-{i}", next_problem=n, replicas=3, begins=100)
        for i, n in ((0, 102), (1, 130), (2, 101))
    ]
    assert [resumed(f"x-{i}", i, 3, three) for i in range(3)] == three
    assert resumed("x-2", 2, 3, three[:2]).next_problem == 101  # the one that never wrote
    assert [resumed(f"x-{i}", i, 2, three).next_problem for i in range(2)] == [130, 131]


def test_the_same_number_of_replicas_goes_on_where_it_was():
    assert resumed("x-1", 1, 2, []) == EnvProgress(producer="x-1", next_problem=1, replicas=2)
    early = EnvProgress(producer="x-0", next_problem=40, replicas=2)
    assert resumed("x-1", 1, 2, [early]).next_problem == 1  # it starts late, and skips nothing
    unsaid = EnvProgress(producer="x-0", next_problem=40, open_problems=[38], published_groups=19)
    assert resumed("x-0", 0, 2, [unsaid]) == EnvProgress(
        producer="x-0", next_problem=40, open_problems=[38], published_groups=19, replicas=2
    )
