"""Which problems are left out, worked by hand; and in the env's loop over a log in memory: restarts
keep it, replicas share it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.envs import Env, PassRate
from streamrl.envs import process, report
from streamrl.envs.dataset_order import DatasetIndex
from streamrl.envs.difficulty_filter import ProblemStats, is_filtered, to_visit
from streamrl.inference.clients import client
from streamrl.inference.clients.client import SampledCompletion
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Demand, Rollout, VersionSpan, Visit
from streamrl.system.errors import ConfigError
from tests.support import life
from tests.support.build import floats, rollout, tokens
from tests.support.data_path import publish

RULES = PassRate(between=(0.25, 0.75))


def visit(epoch: int, passed: int, rollouts: int = 4, problem: int = 0, version: int = 0) -> Visit:
    return Visit(
        environment="x",
        problem=problem,
        epoch=epoch,
        passed=passed,
        rollouts=rollouts,
        policy_version=version,
    )


# ---- the decision --------------------------------------------------------------------------------


@pytest.mark.parametrize(("passed", "left_out"), [(0, True), (1, False), (3, False), (4, True)])
def test_what_is_outside_of_the_bounds_rests(passed: int, left_out: bool):
    assert is_filtered(RULES, [visit(0, passed)], 1) is left_out


def test_it_rests_for_so_many_epochs_and_comes_back():
    rules = RULES.model_copy(update={"rest_epochs": 3})
    assert [is_filtered(rules, [visit(2, 4)], epoch) for epoch in range(8)] == [
        False,
        False,
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_the_last_visits_count_together_and_fewer_say_nothing():
    rules = RULES.model_copy(update={"visits": 2})
    assert not is_filtered(rules, [], 1) and not is_filtered(rules, [visit(0, 4)], 1)
    assert not is_filtered(rules, [visit(0, 4), visit(1, 2)], 2)  # 6 of 8: 0.75
    assert is_filtered(rules, [visit(1, 4), visit(0, 2, 3)], 2)  # 6 of 7, whatever the order
    assert not is_filtered(
        rules, [visit(0, 4), visit(1, 4), visit(3, 0)], 4
    )  # the last two: 4 of 8
    # what is known of epoch 2 says nothing about epoch 2
    assert not is_filtered(rules, [visit(0, 4), visit(1, 2), visit(2, 4)], 2)


def test_a_rollout_passes_by_its_reward_or_one_of_its_rewards():
    group = [
        rollout(sample=i, version=i, reward=r, rewards={"correct": c})
        for i, (r, c) in enumerate([(1.0, 0.0), (0.4, 1.0), (0.0, 1.0)])
    ]
    group += [
        rollout(sample=3, failure="no server"),
        rollout(sample=4, reward=1.0, misaligned="lengths differ"),
    ]
    assert to_visit(RULES, "x", DatasetIndex(2, 7), group) == visit(2, 1, 3, 7, version=2)
    assert to_visit(PassRate(at_least=0.4), "x", DatasetIndex(2, 7), group) == visit(
        2, 2, 3, 7, version=2
    )
    assert to_visit(PassRate(reward="correct"), "x", DatasetIndex(2, 7), group) == visit(
        2, 2, 3, 7, version=2
    )
    assert to_visit(RULES, "x", DatasetIndex(2, 7), group[3:]) is None


def test_what_compaction_leaves_is_enough():
    """Visits of a problem that is always too easy, at the epochs at which it is posed: only the
    newest of each key are left, and decide the same.
    """
    rules = PassRate(between=(0, 0.5), visits=3, rest_epochs=2)
    all_of_them = ProblemStats(rules, "x", lambda number: DatasetIndex(number, 0))
    compacted = dict[str, Visit]()
    posed = list[int]()
    for epoch in range(60):
        fresh = ProblemStats(rules, "x", lambda number: DatasetIndex(number, 0))
        for known in compacted.values():
            fresh.on_visit(known)
        assert fresh.is_filtered(epoch) == all_of_them.is_filtered(epoch)
        if not all_of_them.is_filtered(epoch):
            posed.append(epoch)
            made = visit(epoch, epoch % 5)
            all_of_them.on_visit(made)
            compacted[all_of_them.key(made)] = made
    assert len(posed) < 40 and max(b - a for a, b in pairwise(posed)) == 3
    assert len(compacted) <= 9


def test_an_older_visit_does_not_take_the_place_of_a_newer_one():
    visits = ProblemStats(PassRate(between=(0, 0.5)), "x", lambda number: DatasetIndex(number, 0))
    visits.on_visit(visit(2, 4))
    visits.on_visit(visit(0, 0))  # the same slot, read later
    assert visits.is_filtered(3)


def test_a_visit_of_nothing_cannot_be():
    for passed, rollouts in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="visit of problem 0"):
            visit(0, passed, rollouts)


# ---- in the env ----------------------------------------------------------------------------------

SIZE = 10
GROUP = 2


class Solver:
    """Solves the problems with an even answer, always, and no others."""

    def __init__(self, *given: object, **named: object) -> None: ...

    def on_server(self, server_id: str, server: object) -> None: ...

    async def close(self) -> None: ...

    async def sample(
        self, messages: list[dict[str, str]], n: int, env: Env, *more: object
    ) -> list[SampledCompletion]:
        number = messages[0]["content"]
        text = number if int(number) % 2 == 0 else "?"
        spans = [VersionSpan(version=0, start=0, end=1)]
        return [
            SampledCompletion(
                server_id="s",
                prompt_tokens=tokens(1),
                tokens=tokens(8),
                logprobs=floats(-1),
                text=text,
                finish_reason="stop",
                version_spans=spans,
                latency_s=0.0,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                max_tokens=1,
            )
            for _ in range(n)
        ]


@pytest.fixture(autouse=True)
def solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Client", Solver)


def run_file(directory: Path, replicas: int = 1, **env: Any) -> RunFile:
    file = directory / "numbers.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": str(i), "gt_answer": str(i)}) for i in range(SIZE))
    )
    made = {
        "kind": "dataset",
        "params": {"file": str(file), "reward": "exact"},
        "replicas": replicas,
        "max_tokens": 1,
        "max_groups_in_flight": 1,
        "pass_rate": {"between": [0, 0.9], "rest_epochs": 2},
        **env,
    }
    return parse({"run": "r", "envs": {"x": made}, "buffer": {"group_size": GROUP}})


def log_for(replicas: int = 1) -> MemoryLog:
    log = MemoryLog(
        dict.fromkeys(
            [
                "demand",
                "servers",
                "rollouts.x",
                "visits.x",
                "metrics",
                *(f"journal.env-x-{i}" for i in range(replicas)),
            ],
            1,
        )
    )
    publish(
        log,
        Output(
            "demand",
            "x",
            Demand(environment="x", wanted_tokens=10**9, held_tokens=0, closed_groups={}),
        ),
    )
    return log


def live(log: MemoryLog, run: RunFile, until: Callable[[], bool], replica: int = 0) -> None:
    life.run_until(lambda stop: process.main(run, log, stop, "x", replica), until)


def posed(log: MemoryLog) -> list[tuple[int, int]]:
    """(epoch, the number that was to be said) of each group, in order."""
    found = (to_event(message, ("rollout",)).record for message in read(log, "rollouts.x", 0, 0))
    groups = {
        r.group_id: (r.metadata["epoch"], r.metadata["line"] - 1)
        for r in found
        if isinstance(r, Rollout)
    }
    return list(groups.values())


def by_epoch(log: MemoryLog) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for epoch, number in posed(log):
        found.setdefault(epoch, set()).add(number)
    return found


ODD = {1, 3, 5, 7, 9}
ALL = set(range(SIZE))


def test_what_is_solved_rests_and_comes_back(tmp_path: Path):
    log = log_for()
    live(log, run_file(tmp_path), lambda: max(by_epoch(log), default=0) >= 7)
    epochs = by_epoch(log)
    # one group at a time, heard of before the next is chosen
    assert [epochs[epoch] for epoch in range(7)] == [ALL, ODD, ODD, ALL, ODD, ODD, ALL]
    assert len(posed(log)) == len(set(posed(log))), "no problem twice in an epoch"


def test_a_restart_keeps_it_whenever_it_comes(tmp_path: Path):
    """Ten lives of a few groups each: the same epochs as in one."""
    log = log_for()
    for _ in range(10):
        before = len(posed(log))
        live(log, run_file(tmp_path), lambda before=before: len(posed(log)) >= before + 5)
    epochs = by_epoch(log)
    last = max(epochs)
    assert last >= 5 and [epochs[epoch] for epoch in range(last)] == [
        ODD if epoch % 3 else ALL for epoch in range(last)
    ]


def test_without_the_filter_all_are_posed(tmp_path: Path):
    """Otherwise the tests above could not fail."""
    log = log_for()
    live(log, run_file(tmp_path), lambda: len(posed(log)) >= SIZE)
    forgetful = run_file(tmp_path, pass_rate=None)
    before = len(posed(log))
    live(log, forgetful, lambda: len(posed(log)) >= before + SIZE)
    assert by_epoch(log)[1] - ODD


def test_replicas_share_what_they_know(tmp_path: Path):
    """The first replica poses half of epoch 0, the second the rest and then its half of epoch 1:
    without what either found solved.
    """
    log = log_for(2)
    run = run_file(tmp_path, replicas=2)
    live(log, run, lambda: len(posed(log)) >= SIZE // 2)
    first = posed(log)
    solved = {number for epoch, number in first if epoch == 0} - ODD
    assert len(solved) >= 1
    live(
        log,
        run,
        lambda: max((epoch for epoch, _ in posed(log)[len(first) :]), default=0) >= 2,
        replica=1,
    )
    second = posed(log)[len(first) :]
    assert {number for epoch, number in first if epoch == 0} | {
        number for epoch, number in second if epoch == 0
    } == ALL
    assert not solved & {number for epoch, number in second if epoch == 1}


def test_an_env_without_a_finite_set_has_nothing_to_leave_out(tmp_path: Path):
    for kind, params in (("copy-digits", {}), ("multiple-choice", {})):
        with pytest.raises(
            ConfigError,
            match=(
                f"^envs.x.pass_rate: {kind} poses no problem twice, so there is nothing to leave"
                " out; it takes an env"
            ),
        ):
            live(log_for(), run_file(tmp_path, kind=kind, params=params), lambda: False)


def test_the_bounds_are_in_order_and_its_keys_are_known(tmp_path: Path):
    with pytest.raises(ConfigError, match="envs.x.pass_rate.between: 0.5 is the lowest"):
        run_file(tmp_path, pass_rate={"between": [0.5, 0.2]})
    with pytest.raises(
        ConfigError, match=r"unknown key 'envs.x.pass_rate.visit'; did you mean 'visits'\?"
    ):
        run_file(tmp_path, pass_rate={"visit": 2})


def test_a_reward_that_nobody_earns_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(report, "REPORT_S", 0.05)
    live(
        log_for(),
        run_file(tmp_path, pass_rate={"reward": "corect"}),
        lambda: "did you mean" in caplog.text,
    )
    assert (
        "envs.x.pass_rate.reward: no rollout has earned a 'corect'; did you mean 'correct'?"
        in caplog.text
    )
