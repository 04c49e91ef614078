"""What an outage of the batcher, or a clock that is set, changes about what it decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.batcher import demand
from streamrl.batcher.process import step
from streamrl.batcher.state import BatcherState
from streamrl.stream.records import Batch, Demand, ScoredGroup
from tests.support.batcher import CONFIG
from tests.support.build import group, group_event, version_event
from tests.support.outages import Arrivals, polls

# Records come every 20 s, and no limit is reached within 2 s of one: those of producers after 43 s,
# or 86 s where one wait begins at the end of another, that of a shortage after 25 s.
EVERY_S = 20
END_S = 240
LIMIT_S = 43.0
ENVS = ("copy", "add")
PRODUCERS = ("a", "b", "c")
RULES = replace(
    CONFIG,
    fractions=dict.fromkeys(ENVS, 0.5),
    total_token_budget=40,
    row_count=8,
    max_age=4,
    spill=True,
    producers={env: list(PRODUCERS) for env in ENVS},
    group_tokens=dict.fromkeys(ENVS, 10),
    group_limits_s=dict.fromkeys(ENVS, LIMIT_S),
)


@pytest.fixture(autouse=True, scope="module")
def shortage() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demand, "SHORTAGE_AFTER_S", 25.0)
        yield


class Decisions(NamedTuple):
    """What the batcher decided, in order, and which producers it ever took to be absent."""

    demands: list[Demand]
    batches: list[list[str]]
    absent: set[tuple[str, str]]  # env and producer


@st.composite
def arrivals(draw: st.DrawFn) -> Arrivals:
    """The groups of each env's producers, each of which may stop for a while or for good; and some
    versions.
    """
    sent: Arrivals = [(0, version_event(0))]
    for second in range(EVERY_S, END_S, EVERY_S):
        for env in ENVS:
            for producer in draw(st.lists(st.sampled_from(PRODUCERS), unique=True)):
                made = group(env, f"{env}-{producer}-{second}")
                sent.append(
                    (second, group_event(0, msgspec.structs.replace(made, producer=producer)))
                )
        if draw(st.booleans()):
            version = sum(event.topic == "policy-versions" for _, event in sent)
            sent.append((second, version_event(version)))
    return sent


def decided(sent: Arrivals, end_s: int = END_S, **disturbed: Any) -> Decisions:
    """What is decided before second `end_s`, where the batcher is disturbed as in `polls`."""
    state = BatcherState()
    found = Decisions([], [], set())
    for poll in polls(sent, end_s, **disturbed):
        state.clock.is_behind = poll.is_behind
        state, outputs = step(RULES, state, poll.events, poll.time_s)
        for output in outputs:
            match output.record:
                case Demand() as record:
                    found.demands.append(record)
                case Batch() as batch:
                    found.batches.append(batch.group_ids)
                case _:
                    pass
        for env, queue in state.queues.items():
            found.absent.update((env, producer) for producer in queue.away)
    return found


@settings(deadline=None, max_examples=25)
@given(arrivals(), st.integers(0, END_S), st.floats(-1e5, 1e5))
def test_a_clock_that_is_set_changes_no_decision(sent: Arrivals, jump_at: int, jump_s: float):
    assert decided(sent, jump_at=jump_at, jump_s=jump_s) == decided(sent)


@settings(deadline=None, max_examples=25)
@given(arrivals(), st.integers(1, END_S), st.integers(1, 1_000))
def test_an_outage_of_all_parts_changes_no_decision(sent: Arrivals, away_at: int, away_s: int):
    later = [(at + away_s if at >= away_at else at, event) for at, event in sent]
    disturbed = decided(later, away_at=away_at, away_s=away_s, end_s=END_S + away_s)
    assert disturbed == decided(sent)


def with_pauses(sent: Arrivals) -> set[tuple[str, str]]:
    """Env and producer of each that ended no group for longer than one takes."""
    last = {(env, producer): 0 for env in ENVS for producer in PRODUCERS}
    paused = set[tuple[str, str]]()
    for second, event in sent:
        if isinstance(event.record, ScoredGroup):
            name = event.record.environment, event.record.producer
            if second - last[name] > LIMIT_S:
                paused.add(name)
            last[name] = second
    return paused | {name for name, second in last.items() if END_S - second > LIMIT_S}


@settings(deadline=None, max_examples=25)
@given(arrivals(), st.integers(1, END_S), st.integers(1, 1_000))
def test_an_outage_of_the_batcher_makes_no_producer_absent(
    sent: Arrivals, away_at: int, away_s: int
):
    end_s = max(END_S, away_at + away_s + 1)
    disturbed = decided(sent, away_at=away_at, away_s=away_s, end_s=end_s)
    assert disturbed.absent <= with_pauses(sent)
