"""How much work the batcher asks each env for: groups of 10 tokens, batches of a few groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamrl.batcher.demand import (
    absent_producers,
    tokens_from_any_env,
    update_grants,
    wanted_tokens,
)
from streamrl.batcher.process import step
from streamrl.batcher.selection import REMAINDER
from streamrl.batcher.state import SHORTAGE_AFTER_S, BatcherState, EnvQueue
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Demand
from tests.support.batcher import CONFIG, arrivals, step_once
from tests.support.build import group, group_event, version_event


def test_demand_covers_the_batches_that_new_rollouts_could_serve():
    # version 0, lookahead 0, max age 1: batches 0 and 1, 20 tokens each; one group of 10 is held,
    # and half a group less is wanted, as a surplus would be too old for batch 2
    out = step_once([version_event(0), *arrivals("a")])
    demand = [o.record for o in out if isinstance(o.record, Demand)][-1]
    assert (demand.wanted_tokens, demand.held_tokens, demand.closed_groups) == (
        25,
        10,
        {"copy-0": 1},
    )


def test_after_its_batch_is_built_only_the_next_one_is_wanted():
    out = step_once([version_event(0), *arrivals("a", "b")])
    assert [o.record for o in out if isinstance(o.record, Demand)][-1].wanted_tokens == 20 - 5


def test_groups_that_are_larger_than_a_share_are_rounded_to_the_nearest_number():
    """Batches of 20 tokens, of which the env has a tenth: its groups of 10 are in every fifth. It
    begins a group whenever it has less in flight than is wanted.
    """
    config = replace(CONFIG, fractions={"copy": 0.1, "add": 0.9}, max_age=2)
    queue = EnvQueue(measured=1, measured_tokens=10)
    for owed, wanted in ((-4.0, 0), (1.0, 0), (2.0, 1), (11.0, 10), (12.0, 11)):
        state = BatcherState(
            version=0, next_batch=0, queues={"copy": queue}, deficit={"copy": owed, "add": -owed}
        )
        assert wanted_tokens(config, state)["copy"] == wanted
    state.short = {"copy": 1}
    state.deficit = {"copy": 0.0, "add": 0.0}
    assert wanted_tokens(config, state)["copy"] == 1
    whole = replace(config, fractions={"copy": 0.5, "add": 0.5})
    assert wanted_tokens(whole, state)["copy"] == 20


@pytest.mark.parametrize(("max_age", "wanted"), [(1, 15), (2, 20)])
def test_half_a_group_less_is_wanted_where_a_surplus_would_be_too_old(max_age: int, wanted: int):
    """Work that begins now is for batches 0 and 1, of which the env has half: 20 tokens."""
    config = replace(CONFIG, fractions={"copy": 0.5, "add": 0.5}, max_age=max_age)
    queue = EnvQueue(measured=1, measured_tokens=10)
    state = BatcherState(version=0, next_batch=0, queues={"copy": queue})
    assert wanted_tokens(config, state)["copy"] == wanted


def test_before_the_first_group_its_size_is_thought_of():
    config = replace(CONFIG, fractions={"copy": 0.1, "add": 0.9}, group_tokens={"copy": 6})
    state = BatcherState(version=0, next_batch=0)
    assert wanted_tokens(config, state)["copy"] == 1


class Asked(dict[str, float]):
    """Counts how often all of it is gone through."""

    times = 0

    def items(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.times += 1
        return super().items()


def test_the_shares_are_gone_through_as_often_for_many_envs_as_for_few():
    asked: list[int] = []
    for envs in (2, 50):
        fractions = Asked({f"env-{i}": 1 / envs for i in range(envs)})
        out = step_once(
            [version_event(0), *arrivals("a", "b", env="env-0")],
            replace(CONFIG, fractions=fractions, lookahead=8, total_token_budget=1000),
        )
        assert sum(isinstance(o.record, Demand) for o in out) == envs
        asked.append(fractions.times)
    assert asked[0] == asked[1]


def test_demand_is_said_again_only_when_it_changes():
    state, _ = step(CONFIG, BatcherState(), [version_event(0)], 0.0)
    assert step(CONFIG, state, [version_event(0, learner="other")], 1.0)[1] == []


def test_without_fractions_each_env_is_asked_for_an_even_part_of_the_batches_to_come():
    # half of two batches of 40 each, less what is held and half a group, which would expire
    config = replace(CONFIG, fractions={"copy": 0.0, "add": 0.0}, total_token_budget=40)
    out = step_once([version_event(0), *arrivals("a")], config)
    assert {
        o.record.environment: o.record.wanted_tokens for o in out if isinstance(o.record, Demand)
    } == {"copy": 40 - 10 - 5, "add": 40}


def wanted_of(outputs: list[Output]) -> dict[str, int]:
    return {
        o.record.environment: o.record.wanted_tokens
        for o in outputs
        if isinstance(o.record, Demand)
    }


SPILL = replace(
    CONFIG,
    fractions=dict.fromkeys("abcd", 0.25),
    total_token_budget=80,
    row_count=16,
    max_age=0,
    spill=True,
)


def test_what_others_lack_is_asked_of_an_env_that_holds_its_share():
    # each is due 20 tokens of a batch; one has them, and may supply a quarter of the 60 that lack
    out = step_once([version_event(0), *arrivals("a", "b", env="a")], SPILL)
    assert wanted_of(out) == {"a": 15, "b": 20, "c": 20, "d": 20}


def test_what_others_lack_is_divided_among_those_that_were_in_the_last_batch():
    groups = [group_event(i, group("a", f"g{i}")) for i in range(8)]  # nobody else sends any
    state, _ = step(SPILL, BatcherState(), [version_event(0), *groups], 0.0)
    assert state.next_batch == 1
    late = [group_event(i, group("a", f"g{i}", version=1)) for i in (8, 9)]
    _, out = step(SPILL, state, [version_event(1), *late], 1.0)
    assert wanted_of(out) == {"a": 60, "b": 20, "c": 20, "d": 20}


def test_after_a_while_what_others_lack_is_divided_among_those_that_hold_something():
    first = [version_event(0), *arrivals("a", "b", env="a"), *arrivals("c", env="b")]
    state, out = step(SPILL, BatcherState(), first, 0.0)
    assert wanted_of(out) == {"a": 50 // 4 + 1, "b": 10 - 5, "c": 20, "d": 20}
    _, out = step(SPILL, state, [group_event(9, group("b", "d"))], SHORTAGE_AFTER_S)
    assert wanted_of(out) == {"a": 20, "b": 20}  # 40 lack, and two envs have sent something


def test_an_env_that_holds_a_single_token_seems_to_work():
    queues = {"a": EnvQueue(tokens=1), "b": EnvQueue(tokens=30), "c": EnvQueue()}
    state = BatcherState(short={REMAINDER: 40}, queues=queues, short_since_s=-SHORTAGE_AFTER_S)
    assert tokens_from_any_env(SPILL, state) == 20


def test_less_than_a_token_that_lacks_is_asked_for_as_well():
    assert tokens_from_any_env(SPILL, BatcherState(short={REMAINDER: 0})) == 1
    only_one = replace(CONFIG, fractions={"copy": 1.0})
    assert tokens_from_any_env(only_one, BatcherState(short={REMAINDER: 0})) == 1
    assert tokens_from_any_env(SPILL, BatcherState()) == 0


def test_an_empty_group_counts_as_closed():
    empty = group(name="gone", sizes=())
    out = step_once([version_event(0), group_event(0, empty)])
    assert [o.record.closed_groups for o in out if isinstance(o.record, Demand)] == [{"copy-0": 1}]


def test_grants_are_taken_back_only_while_another_producer_is_there():
    """Both are late, from second 10 on for one and 20 for the other; a group takes 10 s at most."""
    config = replace(CONFIG, producers={"copy": ["a", "b"]}, group_limits_s={"copy": 10.0})
    queue = EnvQueue(closed={"a": 1, "b": 1}, busy_since_s={"a": 0.0, "b": 10.0})
    assert absent_producers(config, "copy", queue, 9.9) == []
    assert absent_producers(config, "copy", queue, 10.0) == ["a"]
    assert absent_producers(config, "copy", queue, 19.9) == ["a"]
    assert absent_producers(config, "copy", queue, 20.0) == []


def test_a_producer_is_waited_for_from_its_first_open_group_on():
    config = replace(
        CONFIG,
        producers={"copy": ["a", "b"]},
        group_limits_s={"copy": 10.0},
        group_tokens={"copy": 10},
    )
    queue = EnvQueue(closed={"a": 1, "b": 1}, granted={"a": 2, "b": 1})
    for awake_s in (0.0, 5.0, 9.9):
        update_grants(config, "copy", queue, 1, awake_s)
        assert queue.away == []
    update_grants(config, "copy", queue, 1, 10.0)
    assert queue.away == ["a"]


def test_an_absent_producer_that_has_ended_no_group_may_have_one_open():
    config = replace(CONFIG, producers={"copy": ["a", "b"]}, group_tokens={"copy": 10})
    queue = EnvQueue(closed={"b": 1}, busy_since_s={"a": 0.0})
    update_grants(config, "copy", queue, 10, 1_000.0)
    assert (queue.away, queue.granted) == (["a"], {"a": 1, "b": 2})


def test_nothing_is_wanted_before_a_version_is_announced():
    assert wanted_tokens(SPILL, BatcherState()) == dict.fromkeys("abcd", 0)


def test_a_run_begins_with_the_groups_that_are_wanted_and_no_more():
    config = replace(CONFIG, producers={"copy": ["a", "b"]}, group_tokens={"copy": 10})
    for wanted, granted in ((10, {"a": 1, "b": 0}), (30, {"a": 2, "b": 1})):
        queue = EnvQueue()
        update_grants(config, "copy", queue, wanted, 0.0)
        assert queue.granted == granted


def test_a_producer_of_which_nothing_has_come_is_waited_for_a_minute():
    config = replace(CONFIG, producers={"copy": ["a", "b"]}, group_limits_s={"copy": 600.0})
    queue = EnvQueue(busy_since_s={"a": 0.0})
    assert absent_producers(config, "copy", queue, 59.9) == []
    assert absent_producers(config, "copy", queue, 60.0) == ["a"]
