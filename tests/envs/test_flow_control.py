from __future__ import annotations

from msgspec import structs

from streamrl.envs.flow_control import OutstandingLimit
from streamrl.stream.records import Demand


def demand(wanted: int, closed: int = 0) -> Demand:
    return Demand(
        environment="copy",
        wanted_tokens=wanted,
        held_tokens=0,
        closed_groups={"copy-0": closed, "copy-1": 99},
    )


def launches(credit: OutstandingLimit) -> int:
    before = credit.launched
    while credit.allows():
        credit.launched += 1
    return credit.launched - before


def test_without_a_demand_nothing_is_launched():
    assert launches(OutstandingLimit("copy-0", 1, 10.0)) == 0


def test_what_is_outstanding_stays_within_what_is_wanted():
    credit = OutstandingLimit("copy-0", 1, 10.0, demand(35))
    assert launches(credit) == 4  # 0, 10, 20, 30 tokens outstanding are less than 35
    credit.demand = demand(35, closed=3)
    assert credit.outstanding == 1 and launches(credit) == 3


def test_replicas_share_it():
    assert [
        launches(
            OutstandingLimit(
                f"copy-{i}",
                2,
                10.0,
                Demand(environment="copy", wanted_tokens=40, held_tokens=0, closed_groups={}),
            )
        )
        for i in (0, 1)
    ] == [2, 2]


def test_the_size_of_a_group_is_measured():
    credit = OutstandingLimit("copy-0", 1, 1000.0)
    assert credit.group_tokens == 1000
    credit.record_group(30)
    credit.record_group(50)
    assert credit.group_tokens == 40


def test_a_size_that_changes_is_followed():
    """A policy whose answers grow from 8 to 40 tokens: after three times as many groups as are
    remembered, the old ones are forgotten.
    """
    credit = OutstandingLimit("copy-0", 1, 1000.0)
    for _ in range(100_000):
        credit.record_group(8)
    for _ in range(3 * 256):
        credit.record_group(40)
    assert 38 < credit.group_tokens <= 40


def test_a_new_epoch_forgets_published_groups_that_are_not_closed():
    """Of 6 launched ones 2 are closed, 3 are published, and 1 is under way."""
    credit = OutstandingLimit("copy-0", 1, 10.0, launched=6)
    credit.on_demand(demand(35, closed=2), unpublished=1)
    assert (credit.outstanding, credit.forgotten) == (4, 0)
    later = structs.replace(demand(35, closed=2), epoch=1)
    credit.on_demand(later, unpublished=1)
    assert (credit.outstanding, credit.launched, credit.forgotten) == (1, 3, 3)
    credit.on_demand(later, unpublished=0)
    assert (credit.outstanding, credit.forgotten) == (1, 3), "once"
