from __future__ import annotations

from streamrl.envs.credit import Counter, Credit
from streamrl.records import Demand, EnvProgress


def demand(wanted: int, closed: int = 0) -> Demand:
    return Demand(environment="copy", wanted_tokens=wanted, held_tokens=0, closed_groups={"copy-0": closed, "copy-1": 99})


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
        launches(Credit(f"copy-{i}", 2, 10.0, Demand(environment="copy", wanted_tokens=40, held_tokens=0, closed_groups={}))) for i in (0, 1)
    ] == [2, 2]


def test_the_size_of_a_group_is_measured():
    credit = Credit("copy-0", 1, 1000.0)
    assert credit.group_tokens == 1000
    credit.measured(30)
    credit.measured(50)
    assert credit.group_tokens == 40


def test_replica_i_of_n_takes_every_nth_problem():
    counters = [Counter(EnvProgress(producer=f"copy-{i}", next_problem=i), 3) for i in range(3)]
    assert [[counter.take() for _ in range(3)] for counter in counters] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_progress_is_what_is_published_and_what_is_open():
    counter = Counter(EnvProgress(producer="copy-0", next_problem=0), 2)
    for _ in range(3):
        counter.take()
    assert counter.done([2]) == EnvProgress(producer="copy-0", next_problem=6, open_problems=[0, 4], published_groups=1)
