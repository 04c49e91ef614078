"""What a replica launches, and what it takes note of. Whole lives of replicas: test_process.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from streamrl.config.sections.envs import Env
from streamrl.envs import replica as replica_module
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.problem_cursor import ProblemCursor
from streamrl.envs.replica import PAUSE_S, Replica, RolloutGroup
from streamrl.stream.log.codec import to_event
from streamrl.stream.records import Demand, EnvProgress, Rollout
from tests.support.build import rollout


class Launched(Replica):
    """It notes which problems it begins, and plays none."""

    begun: list[int]

    def _begin(self, number: int) -> None:
        self.begun.append(number)


def replica(demand: Demand | None = None, **settings: Any) -> Launched:
    made = Launched(
        name="copy",
        journal="journal.env-copy-0",
        settings=Env(**settings),
        runner=SimpleNamespace(recorder=None),  # type: ignore[arg-type]
        group_size=2,
        cursor=ProblemCursor(EnvProgress(producer="copy-0", next_problem=0), step=3),
        limit=OutstandingLimit("copy-0", replicas=1, guess_tokens=10.0, demand=demand),
    )
    made.begun = []
    return made


def wanted(tokens: int, environment: str = "copy") -> Demand:
    return Demand(environment=environment, wanted_tokens=tokens, held_tokens=0, closed_groups={})


def test_groups_are_launched_as_far_as_tokens_are_wanted():
    made = replica(wanted(25))
    made.launch(0.0)
    assert made.begun == [0, 3, 6] and made.limit.outstanding == 3
    made.launch(1.0)
    assert made.begun == [0, 3, 6]
    idle = replica()
    idle.launch(0.0)
    assert idle.begun == []


def test_a_rate_is_kept_and_a_short_delay_is_made_up_for():
    """One is due every 0.125 s, and what was due within BURST_S before is made up for."""
    made = replica(wanted(10**6), max_groups_per_s=8)
    begun: list[int] = []
    for now_s in (100.0, 100.02, 100.03, 100.1, 100.2):
        made.launch(now_s)
        begun.append(len(made.begun))
    assert begun == [2, 2, 3, 3, 4]


async def test_groups_that_fail_in_a_row_are_followed_by_ever_longer_pauses():
    made = replica(wanted(10**6), max_groups_in_flight=1)
    for in_a_row in (1, 2):
        made.running = {await finished(rollout("copy", "g", failure="no server"))}
        made.take_finished(50.0)
        assert made.next_launch_s == pytest.approx(50.0 + in_a_row * PAUSE_S)
    made.running = {await finished(rollout("copy", "g"))}
    assert len(made.take_finished(50.0)) == 1
    assert made.failed_in_a_row == 0 and made.limit.complete == 1


async def finished(*rollouts: Any) -> asyncio.Task[RolloutGroup]:
    async def play() -> RolloutGroup:
        return RolloutGroup(0, list(rollouts))

    task = asyncio.create_task(play())
    await task
    return task


def test_a_group_costs_what_it_would_have_if_none_had_failed():
    whole = rollout("copy", "g", 0)
    failed = rollout("copy", "g", 1, failure="no server")
    assert RolloutGroup(0, [whole, failed]).tokens == 2 * whole.total_tokens
    assert RolloutGroup(0, [failed]).tokens == 0.0


def test_open_problems_are_begun_again_but_for_those_held_out_since(
    monkeypatch: pytest.MonkeyPatch,
):
    made = replica()
    made.cursor = ProblemCursor(
        EnvProgress(producer="copy-0", next_problem=0, open_problems=[3, 6, 9]), step=3
    )
    made.limit.launched = 3
    monkeypatch.setattr(made, "is_held_out", lambda number: number == 6)
    made.resume_open()
    assert made.begun == [3, 9] and made.limit.launched == 2
    assert made.cursor.progress.open_problems == [3, 9]


def test_what_is_published_is_one_transaction_with_the_progress():
    made = replica()
    made.cursor.next()
    group = RolloutGroup(0, [rollout("copy", "g", 0), rollout("copy", "g", 1)])
    messages = made.outputs([group])
    assert [m.topic for m in messages] == ["rollouts.copy"] * 2 + ["journal.env-copy-0"]
    assert made.cursor.progress.published_groups == 1
    assert made.cursor.progress.open_problems == []


def test_held_out_problems_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_module, "HELD_OUT_IN_A_ROW", 3)
    made = replica()
    monkeypatch.setattr(made, "is_held_out", lambda number: True)
    assert made.is_skipped(0) and made.is_skipped(1)
    with pytest.raises(replica_module.ConfigError, match=r"lower `problems` in eval.envs"):
        made.is_skipped(2)


def test_rollouts_carry_the_epoch_of_the_demand_and_the_progress_what_was_forgotten():
    made = replica()
    made.cursor.next()
    made.limit.launched = 3
    made.on_demand(structs.replace(wanted(7), epoch=2))
    messages = made.outputs([RolloutGroup(0, [rollout("copy", "g", 0)])])
    records = [to_event(message, ("rollout", "env-progress")).record for message in messages]
    first, progress = records
    assert isinstance(first, Rollout) and first.epoch == 2
    assert isinstance(progress, EnvProgress)
    assert (progress.epoch, progress.forgotten_groups) == (2, 2)
