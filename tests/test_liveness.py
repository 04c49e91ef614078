"""The loop goes on: envs' accounts, buffer and batcher in one process, whatever becomes of rollouts
and versions, under settings that are accepted.

The step functions are the real ones, and so is the account of each replica. Time is a number that
goes on by a second whenever nobody can act.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.extensions.recordings.audit import held_events
from streamrl.stream.log.protocol import Event
from streamrl.stream.processor.join import RecordRef
from streamrl.stream.records import Batch, Demand, Fate, Rollout, ScoredGroup
from streamrl.system.errors import ConfigError
from tests.support.build import group_event, turns, version_event

BATCHES = 200
GOOD = turns()  # 2 + 3 tokens


@dataclass(frozen=True)
class Mishaps:
    """How often, of 1."""

    failed: float = 0.0
    refused: float = 0.0  # a rollout
    unread: float = 0.0  # what cannot be decoded, and what a producer that dies does not send
    refused_groups: float = 0.0
    stale: float = 0.0  # a group of one version ago
    ahead: float = 0.0  # a rollout that claims a version that comes much later
    version_s: float = 0.0  # that a learner takes for a batch, at most


class Chain:
    """A run of envs that all use the same ids, as envs from outside may."""

    def __init__(self, run: RunFile, mishaps: Mishaps, seed: int, running: int = 9) -> None:
        self.run, self.mishaps, self.random = run, mishaps, random.Random(seed)
        self.buffer, self.batcher = buffer.make_processor(run), batcher.make_processor(run)
        self.state, self.pools = self.buffer.initial(), self.batcher.initial()
        self.credits: dict[str, list[OutstandingLimit]] = {}
        self.resting: dict[str, list[OutstandingLimit]] = {}  # of producers that are away
        for name, env in run.envs.items():
            self.credits[name] = [
                OutstandingLimit(f"{name}-{i}", env.replicas, 10.0)
                for i in range(min(env.replicas, running))
            ]
        # groups that the batcher has not read
        self.ways: dict[str, deque[Event]] = {name: deque() for name in run.envs}
        self.recorded = dict[RecordRef, Rollout]()
        self.time_s = 0.0
        self.version = -1
        self.numbers = dict.fromkeys(run.envs, 0)
        self.learnt: deque[tuple[float, int]] = deque([(0.0, 0)])  # (when it is announced, version)
        self.sent, self.groups = 0, 0
        self.refused = list[Event]()  # not put back so far
        self.gone = list[
            tuple[str, int]
        ]()  # rollouts that no part had read, or whose group none had
        self.ended = list[tuple[str, int]]()

    def rollout(
        self,
        env: str,
        group: int,
        sample: int,
        credit: OutstandingLimit,
        version: int,
        spoilt: bool,
    ) -> Event:
        chance = self.random.random
        rates = self.mishaps
        failed = chance() < rates.failed
        refused = spoilt or chance() < rates.refused
        record = Rollout(
            environment=env,
            problem_id="",
            rollout_uid=f"{group}-{sample}",
            group_id=str(group),
            producer=credit.producer,
            epoch=credit.epoch,
            policy_version=version,
            newest_policy_version=version + (5 if chance() < rates.ahead else 0),
            reward=chance(),
            turns=[] if failed and not refused else GOOD,
            temperature=1e9 if refused else 1.0,
            failure="server gone" if failed and not refused else "",
        )
        self.sent += 1
        event = Event(topology.rollouts(env), 0, self.sent, str(group), record)
        if refused:
            self.refused.append(event)
        return event

    def launch(self, env: str, credit: OutstandingLimit) -> None:
        """A group, as one transaction has it."""
        credit.launched += 1
        self.numbers[env] += 1
        version = max(self.version - (self.random.random() < self.mishaps.stale), 0)
        spoilt = self.random.random() < self.mishaps.refused_groups
        number = self.numbers[env]
        size = self.run.buffer.group_size
        events = [self.rollout(env, number, i, credit, version, spoilt) for i in range(size)]
        read = [event for event in events if self.random.random() >= self.mishaps.unread]
        credit.record_group(5.0 * size)
        # of one that sends nothing, nobody knows that it was to
        self.fold_buffer(read or events[:1])

    def fold_buffer(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event.record, Rollout):
                self.recorded[event.topic, event.partition, event.offset] = event.record
        self.state, outputs = self.buffer.step(self.buffer.config, self.state, events, self.time_s)
        self.note(outputs)

    def fold_batcher(self, events: list[Event]) -> None:
        self.pools, outputs = self.batcher.step(
            self.batcher.config, self.pools, events, self.time_s
        )
        self.note(outputs)

    def note(self, outputs: list[Any]) -> None:
        """Take note of what a part has written."""
        for output in outputs:
            match output.record:
                case ScoredGroup() as group:
                    self.groups += 1
                    rollouts = [self.recorded[place] for place in batcher.references(group)]
                    event = group_event(self.groups, group)
                    event.record = batcher.join_group(group, rollouts) if rollouts else group
                    self.ways[group.environment].append(event)
                case Batch(number=number):
                    after_s = self.random.random() * self.mishaps.version_s
                    last_s = self.learnt[-1][0] if self.learnt else 0.0
                    self.learnt.append((max(self.time_s + after_s, last_s), number + 1))
                case Demand(environment=env) as demand:
                    for credit in (*self.credits[env], *self.resting.get(env, ())):
                        credit.on_demand(demand)
                case Fate(environment=env, offsets=offsets):
                    self.ended += [(env, offset) for offset in offsets.tolist()]
                case _:
                    pass

    def read_groups(self) -> bool:
        closed = self.batcher.paused(self.batcher.config, self.pools)
        events = [
            way.popleft()
            for env, way in self.ways.items()
            if way and topology.groups(env) not in closed
        ]
        if events:
            self.fold_batcher(events)
        return bool(events)

    def announce(self) -> bool:
        """The next version: envs know it first, and who hears it next is a matter of luck."""
        if not self.learnt or self.learnt[0][0] > self.time_s:
            return False
        self.version = self.learnt.popleft()[1]
        for fold in self.random.sample([self.fold_buffer, self.fold_batcher], 2):
            fold([version_event(self.version)])
        return True

    def begin(self) -> bool:
        able = [
            (env, credit)
            for env, credits in self.credits.items()
            for credit in credits
            if credit.allows()
        ]
        if able:
            self.launch(*self.random.choice(able))
        return bool(able)

    def second(self) -> None:
        self.time_s += 1.0
        if self.buffer.due(self.buffer.config, self.state, self.time_s):
            self.fold_buffer([])
        if self.batcher.due(self.batcher.config, self.pools, self.time_s):
            self.fold_batcher([])

    def go(self, batches: int = BATCHES, patience: int = 60_000) -> int:
        """Returns the number of batches made; stops at that many, or when patience is at
        its end.
        """
        for _ in range(patience):
            if self.pools.next_batch >= batches:
                break
            if not (self.read_groups() or self.announce() or self.begin()):
                self.second()
        return self.pools.next_batch

    # ---- what happens to a run ---------------------------------------------------------------

    def retention_deletes_rollouts(self) -> None:
        """The buffer is away while the producers fill their accounts, and retention deletes what it
        has not read.
        """
        fold = self.fold_buffer
        self.fold_buffer = self.lose
        while self.begin() or self.read_groups():
            pass
        self.fold_buffer = fold
        removed = {(topology.rollouts(env), 0): self.sent + 1 for env in self.run.envs}
        self.state, outputs = self.buffer.reconcile(
            self.buffer.config, self.state, removed, self.time_s
        )
        self.note(outputs)

    def lose(self, events: list[Event]) -> None:
        self.gone += [(topology.subject_of(event.topic), event.offset) for event in events]

    def retention_deletes_groups(self) -> None:
        """The batcher is away while the producers fill their accounts, and retention deletes what
        it holds and what it has not read.
        """
        while self.begin():
            pass
        for env, way in self.ways.items():
            for event in way:
                assert isinstance(event.record, ScoredGroup)
                self.gone += [(env, offset) for offset in event.record.offsets.tolist()]
            way.clear()
        removed = {(topology.groups(env), 0): self.groups + 1 for env in self.run.envs}
        self.pools, outputs = self.batcher.reconcile(
            self.batcher.config, self.pools, removed, self.time_s
        )
        self.note(outputs)

    def retry_dead_letters(self) -> None:
        """Every refused rollout is put back, after the cause is gone."""
        refused, self.refused = self.refused, []
        for event in refused:
            assert isinstance(event.record, Rollout)
            self.sent += 1
            record = structs.replace(
                event.record,
                temperature=1.0,
                policy_version=max(self.version, 0),
                newest_policy_version=max(self.version, 0),
            )
            self.fold_buffer([Event(event.topic, 0, self.sent, event.key, record)])

    def producer_goes(self) -> None:
        """One producer of several stops, and another one comes back."""
        for env, credits in self.credits.items():
            away = self.resting.setdefault(env, [])
            if len(credits) > 1:
                away.append(credits.pop(self.random.randrange(len(credits))))
            elif away:
                credits.append(away.pop())

    def balanced(self) -> bool:
        """Has every rollout one end, or is held?"""
        held = [(event.topic.partition(".")[2], event.offset) for event in held_events(self.state)]
        waiting = [event.record for way in self.ways.values() for event in way] + [
            event.record for event in held_events(self.pools)
        ]
        held += [
            (group.environment, offset)
            for group in waiting
            if isinstance(group, ScoredGroup)
            for offset in group.offsets.tolist()
        ]
        ends = [*self.ended, *held, *self.gone]
        return len(set(ends)) == len(ends)


def run_of(envs: dict[str, Any], buffer: dict[str, Any], batcher: dict[str, Any]) -> RunFile:
    sizes = {"max_seq_len": 10, "total_token_budget": 20, "row_count": 8}
    quick = {"rollout_timeout_s": 5.0, "env_timeout_s": 1.0}
    data = {
        "run": "r",
        "envs": {name: {**quick, **env} for name, env in envs.items()},
        "inference": {"max_model_len": 8},  # the least
        "model": {"max_seq_len": 5},
    }
    return run_file.parse(
        {**data, "buffer": {"group_wait_s": 2.0, **buffer}, "batcher": {**sizes, **batcher}}
    )


ONE = {"copy": {"fraction": 1.0}}


SMALL = {"group_size": 2, "max_age": 1, "max_window_tokens": 10}
LARGE = {"total_token_budget": 100, "row_count": 20}


@pytest.mark.parametrize(
    ("envs", "buffer", "batcher", "mishaps"),
    [
        # one refused of a group: no version can come before it closes
        (ONE, {"group_size": 4, "max_age": 0}, {}, Mishaps(refused=0.01)),
        (ONE, {"group_size": 4, "max_age": 1}, {}, Mishaps(refused=0.1)),
        (ONE, {"group_size": 4, "max_age": 2}, {"lookahead": 1}, Mishaps(refused=0.1)),
        # the producer's account
        (ONE, {"group_size": 4, "max_age": 1}, {}, Mishaps(refused_groups=0.01)),
        (
            ONE,
            {"group_size": 4, "max_age": 2},
            {"admission": "capacity"},
            Mishaps(refused_groups=0.1),
        ),
        # groups of fewer than group_size
        (ONE, {"group_size": 4, "min_group_size": 2, "max_age": 0}, {}, Mishaps(unread=0.3)),
        (ONE, SMALL, LARGE, Mishaps()),  # a window below a batch
        ({"copy": {}}, SMALL, LARGE, Mishaps()),
        (
            {"copy": {}, "add": {"fraction": 0.5}},
            {"group_size": 2},
            {},
            Mishaps(ahead=0.2),
        ),  # versions that nobody announces; ids that two envs share
        # the rest takes of what an env's own share needs, which then holds all that it is due
        *[
            (
                {"copy": {"fraction": 0.6}, "add": {"fraction": 0.0}},
                {"group_size": 2, "max_age": 0},
                {"admission": rule, "total_token_budget": 130, "row_count": 34},
                Mishaps(),
            )
            for rule in ("demand", "capacity")
        ],
    ],
)
def test_what_stood_still_goes_on(
    envs: dict[str, Any], buffer: dict[str, Any], batcher: dict[str, Any], mishaps: Mishaps
):
    chain = Chain(run_of(envs, buffer, batcher), mishaps, seed=1)
    assert chain.go(100) >= 100 and chain.balanced()


def test_replicas_that_do_not_run_hold_nothing_up():
    for rule in ("demand", "capacity"):
        run = run_of(
            {"copy": {"fraction": 1.0, "replicas": 4}},
            {"group_size": 2, "max_age": 1},
            {"admission": rule},
        )
        assert Chain(run, Mishaps(), seed=1, running=1).go() >= BATCHES


@pytest.mark.parametrize("admission", ["demand", "capacity"])
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("fraction", [0.1, 0.0])
def test_one_env_of_ten_goes_on_when_the_others_say_nothing(
    admission: str, lookahead: int, fraction: float
):
    run = run_of(
        {f"env-{i}": {"fraction": fraction} for i in range(10)},
        {"group_size": 2, "max_age": 3},
        {
            "admission": admission,
            "lookahead": lookahead,
            "on_shortage": "spill",
            "total_token_budget": 400,
            "row_count": 80,
        },
    )
    chain = Chain(run, Mishaps(), seed=1)
    assert chain.go(10) >= 10
    for env in run.envs:
        chain.credits[env] = chain.credits[env] if env == "env-3" else []
    assert chain.go(30) >= 30 and chain.balanced()


RATE = st.sampled_from([0.0, 0.01, 0.2])


@settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_under_any_settings_that_are_accepted_and_any_mishaps_the_run_reaches_batch_200(
    data: st.DataObject,
):
    def chosen(name: str, *values: Any) -> Any:
        return data.draw(st.sampled_from(values), label=name)

    replicas = chosen("replicas", 1, 3)
    shares = chosen("fractions", (0.0,), (1.0,), (0.5, 0.5), (0.3, 0.0), (0.0, 0.0))
    size = chosen("group_size", 2, 3, 4)
    rules = {
        "group_size": size,
        "min_group_size": chosen("min_group_size", 2, size),
        "max_age": chosen("max_age", 0, 1, 3),
        "max_window_tokens": chosen("max_window_tokens", 20, 40, 1000),
        "advantage": chosen("advantage", "rloo", "maxrl", "reinforce++"),
        "zero_advantage": chosen("zero_advantage", "keep", "filter"),
    }
    batches = {
        "total_token_budget": chosen("budget", 20, 33, 60),
        "lookahead": chosen("lookahead", 0, 1, 2),
        "on_shortage": chosen("on_shortage", "block", "spill"),
        "admission": chosen("admission", "demand", "capacity"),
    }
    try:
        envs = {
            f"env-{i}": {"fraction": share, "replicas": replicas} for i, share in enumerate(shares)
        }
        run = run_of(envs, rules, batches)
    except ConfigError:
        assume(False)
        raise
    rates = {
        name: data.draw(RATE, label=name)
        for name in ("failed", "refused", "unread", "refused_groups", "stale", "ahead")
    }
    chain = Chain(
        run,
        Mishaps(**rates, version_s=chosen("version_s", 0.0, 3.0)),
        data.draw(st.integers(0, 99), label="seed"),
        running=2,
    )
    assert chain.go() >= BATCHES and chain.balanced()


MISHAPS = Mishaps(refused=0.05, refused_groups=0.1, failed=0.05)


@pytest.mark.parametrize("admission", ["demand", "capacity"])
@pytest.mark.parametrize("what", ["retention_deletes_rollouts", "retention_deletes_groups"])
def test_a_run_goes_on_after_retention_has_deleted_what_was_not_read(what: str, admission: str):
    run = run_of(
        {"copy": {"fraction": 1.0, "replicas": 2}},
        {"group_size": 2, "max_age": 1},
        {"admission": admission},
    )
    chain = Chain(run, Mishaps(), seed=1)
    assert chain.go(20) >= 20
    getattr(chain, what)()
    assert chain.gone
    assert chain.go(60) >= 60 and chain.balanced()
    assert all(credit.outstanding >= 0 for credit in chain.credits["copy"])


def test_groups_that_are_put_back_are_counted_once():
    run = run_of({"copy": {"fraction": 1.0}}, {"group_size": 2, "max_age": 1}, {})
    chain = Chain(run, Mishaps(refused_groups=0.3), seed=1)
    assert chain.go(50) >= 50
    (credit,) = chain.credits["copy"]
    chain.mishaps = Mishaps()
    assert len(chain.refused) > 20
    chain.retry_dead_letters()
    while chain.read_groups():
        pass
    open_groups = sum(len(window.open) for window in chain.state.windows.values())
    assert credit.outstanding == open_groups
    assert chain.go(100) >= 100 and chain.balanced()


@settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_retention_retries_and_producers_do_the_run_reaches_its_batch(data: st.DataObject):
    def chosen(name: str, *values: Any) -> Any:
        return data.draw(st.sampled_from(values), label=name)

    max_age = chosen("max_age", 0, 1, 3)
    run = run_of(
        {"copy": {"fraction": 0.5, "replicas": 3}, "add": {"fraction": 0.5, "replicas": 1}},
        {"group_size": chosen("group_size", 2, 4), "max_age": max_age},
        {
            "admission": chosen("admission", "demand", "capacity"),
            "on_shortage": chosen("on_shortage", "block", "spill"),
            "lookahead": chosen("lookahead", 0, min(max_age, 2)),
        },
    )
    chain = Chain(run, MISHAPS, seed=data.draw(st.integers(0, 1_000), label="seed"))
    events = (
        chain.retention_deletes_rollouts,
        chain.retention_deletes_groups,
        chain.retry_dead_letters,
        chain.producer_goes,
    )
    for number in range(8):
        wanted = 10 * (number + 1)
        assert chain.go(wanted) >= wanted
        chosen(f"event {number}", *events)()
    assert chain.go(100) >= 100 and chain.balanced()
    for credits in (*chain.credits.values(), *chain.resting.values()):
        assert all(credit.outstanding >= 0 for credit in credits)
