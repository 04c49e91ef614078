"""When a session becomes a rollout, and what is put aside: event by event."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.assembler import session_assembler
from streamrl.assembler.process import due, make_processor, reconcile, step
from streamrl.assembler.state import AssemblerState
from streamrl.config.run_file import RunFile, parse
from streamrl.errors import ConfigError
from streamrl.log.protocol import Event, Output
from streamrl.records import Record, Reward, Rollout, SessionEnd
from tests.support.sessions import ENV, call, end, reward, start


def run_of(**sessions: Any) -> RunFile:
    settings = {"idle_s": 100, "reward_wait_s": 50, **sessions}
    return parse(
        {
            "run": "r",
            "envs": {ENV: {"kind": "copy-digits", "replicas": 0, "sessions": settings}},
            "buffer": {"group_size": 2},
        }
    )


class Fold:
    """The assembler, fed with records one by one."""

    def __init__(self, **sessions: Any) -> None:
        self.config = make_processor(run_of(**sessions)).config
        self.state = AssemblerState()
        self.offset = 0

    def at(self, time_s: float, *records: Record, key: str = "") -> list[Output]:
        events = [self.event(record, key) for record in records]
        self.state, outputs = step(self.config, self.state, events, time_s)
        return outputs

    def event(self, record: Any, key: str) -> Event:
        self.offset += 1
        topic = f"rewards.{ENV}" if isinstance(record, Reward) else f"turns.{ENV}"
        session = getattr(record, "session", "") or getattr(record, "rollout", "")
        return Event(topic, 0, self.offset, key or session, record, b"bytes")


def rollouts(outputs: list[Output]) -> list[Rollout]:
    return [output.record for output in outputs if isinstance(output.record, Rollout)]


def causes(outputs: list[Output]) -> list[str]:
    return [
        dict(output.record.headers)["__connect.errors.exception.message"].decode()
        for output in outputs
        if output.topic.startswith("dead-letters.") and hasattr(output.record, "headers")
    ]


def test_a_session_becomes_a_rollout_once_it_has_ended_and_has_a_reward():
    fold = Fold()
    assert not fold.at(1, start("s"), call("a", [1], [2]), reward("s"))
    (made,) = rollouts(fold.at(2, end("s")))
    assert (made.rollout_uid, made.reward, made.failure) == ("s", 1.0, "")
    assert not fold.state.envs[ENV].open


def test_rewards_may_come_after_the_end_and_before_the_beginning():
    fold = Fold(rewards=["answer", "style"])
    assert not fold.at(1, reward("s", name="style"), start("s"), call("a", [1], [2]), end("s"))
    (made,) = rollouts(fold.at(40, reward("s", name="answer")))
    assert made.rewards == {"style": 1.0, "answer": 1.0}


def test_sessions_of_a_problem_form_groups_in_the_order_in_which_they_began():
    fold = Fold()
    for number in range(4):
        name = f"s{number}"
        fold.at(number, start(name, "p"), call("a", [1], [2], session=name), reward(name))
    fold.at(5, start("own", "p", group_id="mine"), call("a", [1], [2], session="own"))
    fold.at(6, reward("own"))
    made = rollouts(fold.at(7, *(end(f"s{n}") for n in range(4)), end("own")))
    assert [each.group_id for each in made] == ["p:s0", "p:s0", "p:s2", "p:s2", "mine"]


def test_a_session_that_nobody_ends_has_an_end():
    fold = Fold()
    fold.at(0, start("s"), start("judged"), call("a", [1], [2], session="judged"))
    fold.at(1, reward("judged"))
    assert not fold.at(99)
    outputs = fold.at(101.5)
    failed, made = rollouts(outputs)
    # the gateway hears of it, and the assembler hears its own record
    ends = [each.record for each in outputs if each.topic == f"turns.{ENV}"]
    assert [record.session for record in ends if isinstance(record, SessionEnd)] == ["s", "judged"]
    assert not fold.at(102, *(record for record in ends if isinstance(record, SessionEnd)))
    assert failed.rollout_uid == "s"
    assert "nothing happened for 100 s" in failed.failure
    assert made.truncated
    assert not made.failure


def test_a_session_whose_rewards_do_not_come_fails():
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]), end("s"))
    assert not fold.at(49)
    (failed,) = rollouts(fold.at(51))
    assert "rewards did not come within 50 s" in failed.failure
    assert failed.reward == 0


def test_a_session_that_has_failed_waits_for_no_reward():
    fold = Fold()
    (failed,) = rollouts(fold.at(0, start("s"), end("s", failure="no disk")))
    assert failed.failure == "no disk"


def test_a_reward_that_has_failed_fails_its_rollout():
    fold = Fold(rewards=["answer", "style"])
    fold.at(0, start("s"), call("a", [1], [2]), reward("s", name="answer"))
    (failed,) = rollouts(fold.at(1, end("s"), reward("s", name="style", failure="timed out")))
    assert failed.failure == "reward 'style': timed out"


def test_what_belongs_to_no_session_is_put_aside():
    fold = Fold()
    assert causes(fold.at(0, call("a", [1], [2]))) == ["there is no open session 's'"]
    fold.at(1, start("s"), end("s"))
    assert causes(fold.at(2, call("a", [1], [2]))) == ["session 's' has ended"]
    fold.at(3, reward("nobody"))
    assert causes(fold.at(60)) == ["no session 'nobody' waits for this reward"]
    (cause,) = causes(fold.at(61, start("x"), key="y"))
    assert "its key is 'x'" in cause


@pytest.mark.parametrize("is_open", [True, False])
def test_a_session_has_so_many_rewards_at_most(monkeypatch: pytest.MonkeyPatch, is_open: bool):
    """An agent that goes on giving rewards does not fill the memory of a part of the run."""
    monkeypatch.setattr(session_assembler, "MAX_REWARDS", 2)
    fold = Fold()
    if is_open:
        fold.at(1, start("s"), call("a", [1], [2]))
    fold.at(2, reward("s", value=1.0), reward("s", value=2.0))
    assert causes(fold.at(3, reward("s", value=3.0))) == [
        "session 's' has 2 rewards, which is the most"
    ]
    if not is_open:
        fold.at(4, start("s"), call("a", [1], [2]))
    (made,) = rollouts(fold.at(5, end("s")))
    assert made.reward == 2.0


def test_an_agent_that_is_started_again_goes_on():
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]))
    fold.at(90, start("s"))
    assert not fold.at(150)
    assert len(fold.state.envs[ENV].open["s"].calls) == 1


def test_time_is_looked_at_only_while_something_is_open():
    fold = Fold()
    assert not due(fold.config, fold.state, 10)
    fold.at(10, start("s"))
    assert not due(fold.config, fold.state, 10.5)
    assert due(fold.config, fold.state, 11)
    assert due(fold.config, fold.state, 5)  # the clock was set back


def test_retention_takes_a_session_with_it():
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]), start("t"), reward("u"))
    removed = {(f"turns.{ENV}", 0): 2, (f"rewards.{ENV}", 0): 100}
    fold.state, outputs = reconcile(fold.config, fold.state, removed, 1)
    (failed,) = rollouts(outputs)
    assert (failed.rollout_uid, failed.problem_id) == ("s", "p")
    assert "retention_hours" in failed.failure
    assert list(fold.state.envs[ENV].open) == ["t"]
    assert not fold.state.envs[ENV].unclaimed


def test_sessions_of_an_env_that_is_taken_out_are_failed():
    fold = Fold()
    fold.at(0, start("s"))
    without = type(fold.config)(envs={})
    fold.state, outputs = reconcile(without, fold.state, {}, 1)
    assert [each.failure for each in rollouts(outputs)] == ["its env was taken out of the run"]


def test_a_run_without_sessions_has_no_assembler():
    with pytest.raises(ConfigError, match="no env of the run has sessions"):
        make_processor(parse({"run": "r", "envs": {"copy-digits": {}}}))


def test_a_reward_that_a_rollout_gets_later_is_none_that_a_session_waits_for():
    fold = Fold(rewards=["answer"])
    later = reward("s", name="answer", rescored=True)
    assert not fold.at(1, later, start("s"), call("a", [1], [2]), end("s"), later)
    (made,) = rollouts(fold.at(2, reward("s", name="answer")))
    assert made.reward == 1.0
    assert not causes(fold.at(1_000, later))
