"""New rewards for recorded rollouts: what is judged, what is refused, and what a second
call does.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import parse
from streamrl.envs.api import Completion, Problem, RewardBreakdown, SingleTurnEnv
from streamrl.extensions.recordings.rescore import (
    ATTEMPTS,
    RescoreResult,
    RewardScorer,
    UnsupportedRewardLevel,
    completion_of,
    problem_of,
    rescore,
    resolve_env_option,
    rewards_of_scorer,
    scorer_of,
)
from streamrl.stream.log.memory import MemoryLog, MemoryWriter
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Reward, Rollout
from streamrl.system.errors import ConfigError
from tests.support.build import rollout, turns
from tests.support.data_path import publish, published

TOPICS = {"rollouts.copy": 1, "rewards.copy": 1}


class Doubles(SingleTurnEnv):
    """Problem n is `12=`, and its answer is n."""

    def problem(self, number: int) -> Problem:
        return Problem([{"role": "user", "content": "12="}], answer=number)

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        raise AssertionError("a rescored rollout gets no reward of its env")


class OtherWords(Doubles):
    def problem(self, number: int) -> Problem:
        return Problem([{"role": "user", "content": "13="}], answer=number)


def answer(problem: Problem, completion: Completion, rewards: Mapping[str, float]) -> float:
    return problem.answer + rewards["exact"] / 2


def recorded(count: int = 4) -> MemoryLog:
    log = MemoryLog(TOPICS)
    for number in range(count):
        add(log, rollout(sample=number, problem_id=str(number), reward=1.0))
    return log


def add(log: MemoryLog, record: Rollout) -> None:
    publish(log, Output("rollouts.copy", record.group_id, record))


def scorer(function: Callable[..., Any], version: str = "1", **fields: Any) -> RewardScorer:
    settings: dict[str, Any] = {"env": Doubles(), "limit_s": 30.0, **fields}
    return RewardScorer(name="answer", version=version, function=function, **settings)


def run_on(log: MemoryLog, judge: RewardScorer, weight: float = 1.0) -> RescoreResult:
    return asyncio.run(rescore(log, "copy", judge, {"answer": weight}, clock=lambda: 7.0))


def rewards(log: MemoryLog) -> list[Reward]:
    return published(log, "rewards.copy", Reward)


def test_each_rollout_gets_a_record_and_the_env_poses_its_problem_again():
    log = recorded()
    result = run_on(log, scorer(answer), weight=2.0)
    assert (result.rescored, result.failed, result.known) == (4, 0, 0)
    assert (result.before, result.after) == (1.0, 2 * (1.5 + 0.5))
    assert rewards(log) == [
        Reward(
            rollout=f"g0-{number}",
            name="answer",
            value=number + 0.5,
            scorer="answer",
            scorer_version="1",
            time_s=7.0,
            rescored=True,
        )
        for number in range(4)
    ]


def test_a_second_call_does_nothing_twice_and_another_version_begins_anew():
    log = recorded()
    run_on(log, scorer(answer))
    add(log, rollout(sample=9, problem_id="9", reward=1.0))
    again = run_on(log, scorer(answer))
    assert (again.rescored, again.known) == (1, 4)
    assert again.after == (0.5 + 1.5 + 2.5 + 3.5 + 9.5) / 5
    assert len(rewards(log)) == 5
    assert run_on(log, scorer(answer, version="2")).rescored == 5


def test_a_forged_reward_of_the_scorer_is_not_believed():
    log = recorded()
    for number in range(4):
        forged = Reward(
            rollout=f"g0-{number}", name="answer", value=999.0, scorer="answer", scorer_version="1"
        )
        publish(log, Output("rewards.copy", forged.rollout, forged))
    result = run_on(log, scorer(answer))
    assert (result.rescored, result.known, result.after) == (4, 0, (0.5 + 1.5 + 2.5 + 3.5) / 4)


def test_what_is_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch):
    """The second portion of two is ended from outside: the first is in the log and stays."""
    monkeypatch.setattr("streamrl.extensions.recordings.rescore.PORTION", 2)

    def interrupted(problem: Problem, *_: Any) -> float:
        if problem.answer == 3:
            raise UnsupportedRewardLevel("whatever ends it")
        return 1.0

    log = recorded()
    with pytest.raises(UnsupportedRewardLevel):
        run_on(log, scorer(interrupted))
    assert [reward.rollout for reward in rewards(log)] == ["g0-0", "g0-1"]
    result = run_on(log, scorer(answer))
    assert (result.rescored, result.known) == (2, 2)


class Transactions(MemoryLog):
    """Shows what a predecessor has committed once it has a successor, as Kafka may."""

    def writer(self, identity: str, changelog_topic: str = "") -> MemoryWriter:
        given = Reward(
            rollout="g0-1",
            name="answer",
            value=1.5,
            scorer="answer",
            scorer_version="1",
            time_s=7.0,
            rescored=True,
        )
        publish(self, Output("rewards.copy", "g0-1", given))
        return super().writer(identity, changelog_topic)


def test_what_a_predecessor_has_just_committed_is_known():
    log = Transactions(TOPICS)
    add(log, rollout(sample=1, problem_id="1", reward=1.0))
    result = run_on(log, scorer(raises))
    assert (result.known, result.failed) == (1, 0)


def test_failed_and_misaligned_rollouts_and_copies_are_passed_over():
    log = recorded(1)
    add(log, rollout(sample=0, problem_id="0"))
    add(log, rollout(sample=1, failure="no server"))
    add(log, rollout(sample=2, misaligned="other tokens"))
    result = run_on(log, scorer(answer))
    assert (result.rescored, result.passed_over) == (1, 2)


def raises(*_: Any) -> float:
    raise RuntimeError("no judge")


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (raises, "RuntimeError: no judge"),
        (lambda *_: math.nan, "not finite"),
        (lambda *_: math.inf, "not finite"),
        (lambda *_: "1.0", "is '1.0', which is no number"),
        (lambda *_: None, "TypeError"),
        (lambda *_: {}, "it gave no reward"),
        (lambda *_: {"answer": [1]}, "TypeError"),
    ],
)
def test_what_is_no_reward_is_asked_for_again_and_then_fails(
    function: Callable[..., Any], cause: str
):
    calls = list[int]()

    def counted(*given: Any) -> Any:
        calls.append(1)
        return function(*given)

    log = recorded(1)
    result = run_on(log, scorer(counted))
    (reward,) = rewards(log)
    assert cause in reward.failure and (reward.name, reward.value) == ("answer", 0.0)
    assert len(calls) == ATTEMPTS and (result.rescored, result.failed) == (0, 1)


def test_a_function_that_hangs_fails_and_the_others_go_on():
    never = threading.Event()

    def hangs(problem: Problem, *_: Any) -> float:
        if problem.answer == 1:
            never.wait()
        return 1.0

    log = recorded()
    try:
        result = run_on(log, scorer(hangs, limit_s=0.2))
    finally:
        never.set()
    assert (result.rescored, result.failed) == (3, 1)
    assert [r.failure for r in rewards(log) if r.failure] == [
        "TimeLimitExceeded: reward 'answer' took longer than 0.2 s"
    ]


def test_what_failed_is_judged_again_by_the_next_call():
    """The judge was away; one that gives its rewards names of their own is back."""
    log = recorded(2)
    assert run_on(log, scorer(raises)).failed == 2
    again = run_on(log, scorer(lambda *_: {"clear": 0.5, "brief": 1.0}))
    assert (again.rescored, again.failed, again.known) == (2, 0, 0)
    given = rewards_of_scorer(log, "copy", "answer", "1")
    assert [(r.name, r.value, r.failure) for r in given["g0-1"]] == [
        ("clear", 0.5, ""),
        ("brief", 1.0, ""),
    ]
    assert run_on(log, scorer(raises)).known == 2


def test_one_good_attempt_is_enough():
    tries = list[int]()

    async def flaky(*_: Any) -> float:
        tries.append(1)
        if len(tries) < ATTEMPTS:
            raise RuntimeError
        return 0.25

    log = recorded(1)
    run_on(log, scorer(flaky))
    assert [(reward.value, reward.failure) for reward in rewards(log)] == [(0.25, "")]


def test_a_problem_in_other_words_is_not_the_rollouts():
    log = recorded(1)
    run_on(log, scorer(answer, env=OtherWords()))
    assert "now poses another problem 0" in rewards(log)[0].failure


def test_rewards_of_turns_have_no_place_in_a_record():
    log = recorded(1)
    with pytest.raises(UnsupportedRewardLevel, match="one value for the whole rollout"):
        run_on(log, scorer(lambda *_: RewardBreakdown(turns=[{"answer": 1.0}])))


def test_without_an_env_the_problem_is_what_was_said_first():
    metadata = {"task": "add", "truncation": "length"}
    record = rollout(turns=[*turns(), *turns()], metadata=metadata, truncated=True)
    problem = problem_of(record, None)
    assert problem.messages == [{"role": "user", "content": "12="}]
    assert problem.metadata == metadata
    completion = completion_of(record, problem)
    assert [message["role"] for message in completion.messages] == ["user", "assistant"] * 2
    assert len(completion.turns) == 2 and completion.text == "12"
    assert (completion.finished, completion.truncation) == (False, "length")


def test_the_version_of_a_scorer_is_a_hash_of_its_source(tmp_path: Path):
    source = tmp_path / "brief.py"
    source.write_text("def brief(problem, completion, rewards):\n    return 1.0\n")
    run = parse(
        {
            "run": "r",
            "envs": {
                "copy": {"kind": "copy-digits", "rewards": {"brief": {"kind": f"{source}:brief"}}},
                "agents": {"sessions": {}},
            },
        }
    )
    one = scorer_of(run, "copy", "brief", "")
    assert one.version == scorer_of(run, "agents", f"brief={source}:brief", "").version
    assert one.env is not None and scorer_of(run, "agents", f"x={source}:brief", "v").env is None
    source.write_text("def brief(problem, completion, rewards):\n    return 2.0\n")
    assert scorer_of(run, "copy", "brief", "").version != one.version
    with pytest.raises(ConfigError, match="no 'verbose'"):
        scorer_of(run, "copy", "verbose", "")
    with pytest.raises(ConfigError, match="no '@'"):
        scorer_of(run, "copy", f"a@b={source}:brief", "")
    with pytest.raises(ConfigError, match="the run has copy, agents"):
        resolve_env_option(run, "")
    assert resolve_env_option(run, "agents") == "agents"
