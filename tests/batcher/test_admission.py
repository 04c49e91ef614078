"""How much may be in flight: worked numbers, AReaL's inequality held at every moment of simulated
runs, and a replay of a run under it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from msgspec import structs

from streamrl.batcher.admission import (
    admission_named,
    by_capacity,
    by_demand,
    capacity,
    grants,
)
from streamrl.batcher.process import due, step
from streamrl.batcher.state import BatcherState
from streamrl.config import run_file
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Batch, Demand, Fate
from streamrl.system.errors import ConfigError
from tests.support.batcher import CONFIG, arrivals
from tests.support.build import group, group_event, version_event
from tests.support.data_path import RUN, TOPICS, parts, play


def areal(generated: int, batch: int, version: int, eta: int) -> bool:
    """floor((N_r - 1) / B) <= i + eta: arXiv:2505.24298, eq. 3, as it stands there."""
    return (generated - 1) // batch <= version + eta


@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("version", [0, 3])
def test_capacity_is_areals_inequality_solved_for_what_is_in_flight(version: int, eta: int):
    """Batches of 10 rollouts of one token each: 3 are built, 4 rollouts wait. One more than the
    capacity would break the inequality; it does not.
    """
    batch = 10
    built = 3
    held = 4
    free = capacity(by_capacity(version, 0, eta) + 1 - built, batch, 0.0, held)
    under_way = batch * built + held
    if free:
        assert areal(under_way + free, batch, version, eta) and not areal(
            under_way + free + 1, batch, version, eta
        )
    else:
        assert not areal(under_way + 1, batch, version, eta)


def test_the_last_batch_that_work_begun_now_may_be_for():
    assert [
        by_demand(7, lookahead, max_age) for lookahead, max_age in ((0, 0), (0, 4), (1, 4), (6, 4))
    ] == [7, 8, 9, 11]
    assert [by_capacity(7, 1, max_age) for max_age in (0, 1, 8)] == [7, 8, 15]


def test_capacity_by_hand():
    assert capacity(2, 20, 0.0, 10) == 30
    assert capacity(1.5, 21, -1.75, 10) == 20  # 31.5 - 1.75 - 10 = 19.75
    assert capacity(0, 20, 0.0, 10) == 0


def wanted(**changes: object) -> int:
    """After version 0 and one group of 10 tokens: batches of 20."""
    config = replace(CONFIG, **{"max_age": 4, **changes})  # type: ignore[arg-type]
    out = step(config, BatcherState(), [version_event(0), *arrivals("a")], 0.0)[1]
    return [o.record for o in out if isinstance(o.record, Demand)][-1].wanted_tokens


def last_batch_of_mine(version: int, lookahead: int, max_age: int) -> int:
    return version + 2


def test_the_rule_is_a_choice():
    assert wanted() == 2 * 20 - 10  # just in time: batches 0 and 1
    # Half a group less than the rule gives: a surplus would be too old for the batch after those.
    of_ages = [wanted(admission="capacity", max_age=max_age) for max_age in (1, 4)]
    assert of_ages == [30 - 5, 90 - 5]
    assert wanted(admission="capacity", max_age=0) == 10  # what the next batch lacks
    assert wanted(admission="tests.batcher.test_admission:last_batch_of_mine") == 3 * 20 - 10
    with pytest.raises(
        ConfigError, match=r"batcher.admission: 'capcity' is not known; did you mean 'capacity'\?"
    ):
        admission_named("capcity")


def test_groups_are_granted_one_at_a_time_to_whoever_has_the_fewest_open_and_none_is_taken_back():
    assert grants({"a": 0, "b": 0}, {}, 3) == {"a": 2, "b": 1}
    # b has seen one closed, and a none
    assert grants({"a": 2, "b": 1}, {"b": 1}, 3) == {"a": 2, "b": 2}
    assert grants({"a": 2, "b": 2}, {"b": 1}, 1) == {"a": 2, "b": 2}
    # a began its seven under another rule
    assert grants({"a": 0, "b": 0}, {"a": 7}, 2) == {"a": 8, "b": 1}
    assert grants({}, {"outside": 3}, 5) == {}


def test_a_producer_begins_what_it_is_granted():
    credit = OutstandingLimit(
        "copy-1",
        2,
        10.0,
        Demand(environment="copy", wanted_tokens=10**6, held_tokens=0, closed_groups={"copy-1": 3}),
    )
    assert credit.capacity == 50_000
    credit.demand = structs.replace(credit.demand, granted_groups={"copy-0": 9, "copy-1": 5})
    credit.launched = 4
    assert (credit.capacity, credit.outstanding, credit.allows()) == (2, 1, True)
    credit.launched = 5
    assert not credit.allows() and OutstandingLimit("copy-2", 2, 10.0, credit.demand).capacity == 0


class Async:
    """The real batcher and the real account of each replica. Groups take their time, versions come
    when their batch is there: as chance has it.
    """

    def __init__(self, seed: int, eta: int, replicas: int, sizes: tuple[int, ...] = (3, 3)) -> None:
        names = [f"copy-{i}" for i in range(replicas)]
        rule = {
            "admission": "capacity",
            "producers": {"copy": names},
            "group_tokens": {"copy": 10},
        }
        self.config = replace(
            CONFIG, **rule, max_age=eta, lookahead=min(eta, 1), total_token_budget=40, row_count=8
        )
        self.random = random.Random(seed)
        self.sizes = sizes
        self.credits = [OutstandingLimit(name, replicas, 10.0) for name in names]
        self.batches = self.expired = self.launched = self.mixed = 0
        self.flying: list[
            tuple[str, OutstandingLimit, int]
        ] = []  # group, whose, the version it began with
        self.state = BatcherState()
        self.hear(version_event(0))

    def hear(self, event: Event) -> None:
        for output in step(self.config, self.state, [event], 0.0)[1]:
            match output.record:
                case Demand() as demand:
                    for credit in self.credits:
                        credit.demand = demand
                case Batch():
                    self.batches += 1
                case Fate(fate="expired") as fate:
                    self.expired += len(fate.uids)
                case _:
                    pass

    def turn(self) -> None:
        """One thing happens: a launch, a group that comes in, or a version."""
        what = self.random.choice(("launch", "launch", "close", "version"))
        if what == "launch" and (ready := [credit for credit in self.credits if credit.allows()]):
            credit = self.random.choice(ready)
            credit.launched += 1
            self.launched += 1
            self.flying.append((f"g{self.launched}", credit, self.state.version))
        elif what == "close" and self.flying:
            name, credit, version = self.flying.pop(self.random.randrange(len(self.flying)))
            record = group(
                "copy",
                name,
                sizes=self.random.sample(self.sizes, 2),
                version=version,
                newest=self.state.version,
            )
            self.mixed += 2 * (version < self.state.version)
            self.hear(group_event(self.launched, structs.replace(record, producer=credit.producer)))
        elif what == "version" and self.state.version < self.batches:
            self.hear(version_event(self.state.version + 1))


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("eta", [0, 1, 4])
def test_rollouts_in_flight_never_exceed_the_capacity(eta: int, replicas: int):
    """Batches of 8 rollouts of 5 tokens, groups of 2. At every moment the inequality holds for all
    rollouts begun, less those that were dropped. And the run goes on: it is not held by standing
    still.
    """
    for seed in range(8):
        run = Async(seed, eta, replicas)
        for _ in range(1_500):
            run.turn()
            assert areal(2 * run.launched - run.expired, 8, run.state.version, eta)
        assert run.batches >= 30 and (run.mixed > 0 or eta == 0)


def test_with_groups_of_any_size_nothing_is_granted_beyond_the_capacity():
    """Tokens: what is held, and what is in flight at the mean size so far, is less than a group
    above (i + eta + 1) B when a group is begun.
    """
    for seed in range(8):
        run = Async(seed, 2, 3, sizes=(1, 2, 3, 4, 5, 6, 7, 8))
        for _ in range(1_500):
            before = run.launched
            granted = dict(run.state.queues["copy"].granted)
            run.turn()
            pool = run.state.queues["copy"]
            cost = pool.measured_tokens / pool.measured if pool.measured else 10
            if run.launched > before:
                assert len(run.flying) <= sum(granted.values()) - sum(pool.closed.values())
            if sum(pool.granted.values()) > sum(granted.values()):
                open_groups = sum(pool.granted.values()) - sum(pool.closed.values())
                room = (
                    run.state.version + 2 + 1 - run.state.next_batch
                ) * 40 + run.state.deficit.get("copy", 0.0)
                assert pool.tokens + (open_groups - 1) * cost < room
        assert run.batches >= 30


class Replicas(Async):
    """Of the replicas only some run; time goes on by a second whenever none of them can do
    anything.
    """

    def __init__(self, eta: int, replicas: int, running: int) -> None:
        super().__init__(0, eta, replicas)
        self.config = replace(self.config, group_limits_s={"copy": 600.0})
        self.running = self.credits[:running]
        self.time_s = 0.0

    def second(self) -> None:
        self.time_s += 1.0
        if due(self.config, self.state, self.time_s):
            self.told([])

    def told(self, events: list[Event]) -> None:
        for output in step(self.config, self.state, events, self.time_s)[1]:
            if isinstance(output.record, Demand):
                for credit in self.credits:
                    credit.demand = output.record
            self.batches += isinstance(output.record, Batch)

    def launch(self) -> bool:
        able = [credit for credit in self.running if credit.allows()]
        if able:
            credit = min(able, key=lambda credit: credit.launched)
            credit.launched, self.launched = credit.launched + 1, self.launched + 1
            record = group("copy", f"g{self.launched}", version=self.state.version)
            self.told(
                [group_event(self.launched, structs.replace(record, producer=credit.producer))]
            )
        return bool(able)

    def until_version(self, last: int, patience_s: float) -> None:
        for _ in range(100_000):
            if self.state.version >= last or self.time_s > patience_s:
                return
            if self.state.version < self.batches:
                self.told([version_event(self.state.version + 1)])
            elif not self.launch():
                self.second()


@pytest.mark.parametrize(("eta", "running"), [(0, 3), (1, 1), (2, 1)])
def test_what_replicas_that_do_not_run_were_granted_is_taken_back(eta: int, running: int):
    run = Replicas(eta, 4, running)
    run.until_version(50, 3600.0)
    # of which the first minute is the wait for their first group
    assert run.state.version == 50 and run.time_s <= 61
    run.running = run.credits  # they have come
    run.until_version(80, 3600.0)
    launched = [credit.launched for credit in run.credits]
    assert run.state.version == 80 and min(launched) > 5


def test_a_replica_that_ran_and_died_is_waited_for_as_long_as_a_group_may_take():
    run = Replicas(0, 4, 4)
    run.until_version(10, 3600.0)
    assert run.time_s == 0
    run.running = run.credits[:3]
    run.until_version(50, 3600.0)
    assert run.state.version == 50 and 600 <= run.time_s <= 602


def test_a_run_under_it_replays_bit_for_bit():
    run = run_file.with_overrides(RUN, ["batcher.admission=capacity"])
    log = MemoryLog(TOPICS)
    batches = play(log, 4, run)
    results = [replay(log, each)[0] for each in parts(run)]
    assert [result.difference for result in results] == ["", ""] and results[1].identical[
        "batches"
    ] == len(batches) >= 4
    # what was recorded is what is folded: the settings of the journal, not those of today
    other = run_file.with_overrides(run, ["buffer.max_age=3"])
    assert replay(log, parts(other)[1])[0].difference == ""
