"""When a session becomes a rollout, and what is dead-lettered: event by event."""

from __future__ import annotations

import random
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.envs.sessions import reward_progress
from streamrl.extensions.assembler import session_assembler
from streamrl.extensions.assembler.process import due, make_processor, reconcile, report, step
from streamrl.extensions.assembler.session_assembler import counts
from streamrl.extensions.assembler.state import AssemblerState
from streamrl.stream.log.protocol import Event, Output
from streamrl.stream.processor.snapshots import held_events
from streamrl.stream.records import ENV_REMOVED, Record, Rollout, SessionEnd
from streamrl.stream.records.limits import MAX_ID
from streamrl.system.errors import ConfigError
from tests.support.sessions import ENV, call, end, reward, start


def run_of(**sessions: Any) -> RunFile:
    settings = {"idle_s": 100, "reward_wait_s": 50, **sessions}
    return parse(
        {
            "run": "r",
            "envs": {ENV: {"kind": "copy-digits", "sessions": settings}},
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
        session = getattr(record, "session", "") or getattr(record, "rollout", "")
        return Event(f"turns.{ENV}", 0, self.offset, key or session, record, b"bytes")

    def wait(self, seconds: float) -> list[Output]:
        """Outputs while the clock advances, a second at a time, and no record comes but those that
        the assembler writes itself.
        """
        outputs = list[Output]()
        for _ in range(int(seconds)):
            made = self.at(self.state.clock.last_step_s + 1)
            made += self.at(self.state.clock.last_step_s, *ends_of(made))
            outputs += made
        return outputs


def rollouts(outputs: list[Output]) -> list[Rollout]:
    return [output.record for output in outputs if isinstance(output.record, Rollout)]


def ends_of(outputs: list[Output]) -> list[SessionEnd]:
    return [output.record for output in outputs if isinstance(output.record, SessionEnd)]


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


def test_rewards_may_come_before_and_after_the_end():
    fold = Fold(rewards=["answer", "style"])
    assert not fold.at(1, start("s"), call("a", [1], [2]), reward("s", name="style"), end("s"))
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
    assert not fold.wait(98)
    outputs = fold.wait(3)
    failed, made = rollouts(outputs)
    # the gateway hears of it, and the assembler acts when it reads its own record
    assert [(each.session, each.is_last) for each in ends_of(outputs)] == [
        ("s", True),
        ("judged", True),
    ]
    assert failed.rollout_uid == "s"
    assert "nothing happened for 100 s" in failed.failure
    assert made.truncated
    assert made.metadata["truncation"] == "time"
    assert not made.failure


def test_what_is_in_the_log_before_the_last_end_still_counts():
    """A call and a reward that came while the assembler wrote the end."""
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]))
    outputs = list[Output]()
    while not ends_of(outputs):
        outputs = fold.at(fold.state.clock.last_step_s + 1)
    late = call("b", [3], [4], continues="a")
    (made,) = rollouts(fold.at(200, late, reward("s", call="b"), *ends_of(outputs)))
    assert (made.reward, len(made.turns)) == (1.0, 4)


def test_a_session_whose_rewards_do_not_come_fails():
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]), end("s"))
    assert not fold.wait(49)
    (failed,) = rollouts(fold.wait(3))
    assert "rewards did not come within 50 s" in failed.failure
    assert failed.reward == 0


def test_rewards_of_single_calls_that_come_after_the_end_count_all():
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]), call("b", [3], [4], continues="a"), end("s"))
    assert not fold.at(1, reward("s", 0.25, call="a"))
    (made,) = rollouts(fold.at(2, reward("s", 0.5, call="b")))
    assert made.reward == 0.75
    assert [turn.reward for turn in made.turns if turn.logprobs is not None] == [0.25, 0.5]


def test_a_reward_of_the_whole_rollout_completes_it_and_others_count_until_the_wait_is_over():
    fold = Fold()
    calls = [call("a", [1], [2]), call("b", [3], [4], continues="a")]
    fold.at(0, start("s"), *calls, end("s"), reward("s", 0.25, call="a"))
    (made,) = rollouts(fold.at(1, reward("s", 0.0, name="done")))
    assert made.reward == 0.25
    fold.at(2, start("t"), *(call("a", [1], [2], session="t"), call("b", [3], [4], session="t")))
    fold.at(3, end("t"), reward("t", 0.25, call="a"))
    (waited,) = rollouts(fold.wait(55))
    assert (waited.rollout_uid, waited.reward, waited.failure) == ("t", 0.25, "")


def test_each_name_that_is_waited_for_is_given_to_all_calls_or_to_the_rollout():
    fold = Fold(rewards=["answer", "style"])
    calls = [call("a", [1], [2]), call("b", [3], [4], continues="a")]
    fold.at(0, start("s"), *calls, end("s"))
    assert not fold.at(1, reward("s", name="style", call="a"), reward("s", name="answer"))
    assert not fold.at(2, reward("s", 3.0, name="style", call="a"))
    (made,) = rollouts(fold.at(3, reward("s", name="style", call="b")))
    assert made.rewards == {"style": 4.0, "answer": 1.0}


def test_a_session_that_has_failed_waits_for_no_reward():
    fold = Fold()
    (failed,) = rollouts(fold.at(0, start("s"), end("s", failure="no disk")))
    assert failed.failure == "no disk"


def test_a_reward_that_has_failed_fails_its_rollout():
    fold = Fold(rewards=["answer", "style"])
    fold.at(0, start("s"), call("a", [1], [2]), reward("s", name="answer"))
    (failed,) = rollouts(fold.at(1, end("s"), reward("s", name="style", failure="timed out")))
    assert failed.failure == "reward 'style': timed out"


def test_what_belongs_to_no_session_is_dead_lettered():
    fold = Fold()
    assert causes(fold.at(0, call("a", [1], [2]))) == ["there is no open session 's'"]
    fold.at(1, start("s"), end("s"))
    assert causes(fold.at(2, call("a", [1], [2]))) == ["session 's' has ended"]
    assert causes(fold.at(3, reward("nobody"))) == ["no session 'nobody' waits for a reward"]
    (cause,) = causes(fold.at(61, start("x"), key="y"))
    assert "its key is 'x'" in cause


def test_a_session_has_so_many_rewards_at_most(monkeypatch: pytest.MonkeyPatch):
    """An agent that goes on giving rewards does not fill the memory of a part of the run."""
    monkeypatch.setattr(reward_progress, "MAX_REWARDS", 2)
    fold = Fold()
    fold.at(1, start("s"), call("a", [1], [2]))
    fold.at(2, reward("s", 1.0), reward("s", 2.0, call="a"), reward("s", 3.0))
    assert causes(fold.at(3, reward("s", 4.0, name="other"))) == [
        "session 's': it has 2 rewards, which is the most"
    ]
    (made,) = rollouts(fold.at(5, end("s")))
    assert made.reward == 5.0


def test_a_session_has_so_many_calls_at_most(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_assembler, "MAX_CALLS", 2)
    fold = Fold()
    fold.at(1, start("s"), call("a", [1], [2]), call("b", [3], [4]))
    assert causes(fold.at(2, call("c", [5], [6]))) == ["session 's' has 2 calls, which is the most"]


def test_a_session_has_rewards_of_so_many_names_at_most():
    fold = Fold()
    fold.at(1, start("s"), call("a", [1], [2]))
    names = [reward("s", name=f"n{number}") for number in range(257)]
    assert causes(fold.at(2, *names)) == [
        "session 's': it has rewards of 256 names, which is the most"
    ]


def test_a_reward_that_is_sent_again_and_again_takes_no_more_time():
    """Looking at all rewards for each of them took 8.8 s for 8,000, and minutes for 65,536."""
    fold = Fold(rewards=["a", "b"])
    fold.at(1, start("s"), call("c", [1], [2]), end("s"))
    fold.at(2, *[reward("s", float(i), name="a") for i in range(65_536)])
    assert fold.state.envs[ENV].open["s"].progress.count == 1
    (made,) = rollouts(fold.at(3, reward("s", name="b")))
    assert made.rewards == {"a": 65_535.0, "b": 1.0}


@pytest.mark.parametrize("kind", ["start", "call", "reward"])
def test_records_with_many_bytes_of_headers_are_not_held(kind: str):
    fold = Fold()
    if kind != "start":
        fold.at(0, start("s"))
    record = {"start": start("s"), "call": call("a", [1], [2]), "reward": reward("s")}[kind]
    event = fold.event(record, "")
    event.headers = (("padding", bytes(70_000)),)
    fold.state, outputs = step(fold.config, fold.state, [event], 1.0)
    assert causes(outputs) == ["its headers have 70,007 bytes; 65,536 are the most"]


def test_an_agent_that_is_started_again_goes_on():
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]))
    fold.wait(90)
    fold.at(90, start("s"))
    assert not fold.wait(60)
    assert len(fold.state.envs[ENV].open["s"].calls) == 1


def test_an_agent_that_is_started_again_after_its_session_ended_does_not_prolong_it():
    """The session waits for its reward for 50 s."""
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]), end("s"))
    fold.wait(40)
    fold.at(40, start("s"))
    assert fold.state.envs[ENV].open["s"].restart is None
    assert len(rollouts(fold.wait(20))) == 1


def test_time_is_looked_at_only_while_something_is_open():
    fold = Fold()
    assert not due(fold.config, fold.state, 10)
    fold.at(10, start("s"))
    assert not due(fold.config, fold.state, 10.5)
    assert due(fold.config, fold.state, 11)
    assert due(fold.config, fold.state, 5)  # the clock was set back


def test_retention_takes_a_session_with_it():
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]), start("t"))
    removed = {(f"turns.{ENV}", 0): 3}  # the offset of the other session
    fold.state, outputs = reconcile(fold.config, fold.state, removed, 1)
    (failed,) = rollouts(outputs)
    assert (failed.rollout_uid, failed.problem_id) == ("s", "p")
    assert "retention_hours" in failed.failure
    assert list(fold.state.envs[ENV].open) == ["t"]


def test_a_run_without_sessions_has_no_assembler():
    with pytest.raises(ConfigError, match="no env of the run has sessions"):
        make_processor(parse({"run": "r", "envs": {"copy-digits": {}}}))


@pytest.mark.parametrize(
    ("problem", "session"), [("p" * 300, "s"), ("p" * 256, "s" * 200), ("p" * 100, "s" * 200)]
)
def test_long_names_become_hashes_that_the_buffer_takes(problem: str, session: str):
    """Also those of a group that is named after its problem and first session."""
    fold = Fold()
    names = [f"{session[1:]}{number}" for number in range(2)]
    for name in names:
        fold.at(1, start(name, problem), call("a", [1], [2], session=name), reward(name))
    made = rollouts(fold.at(2, *map(end, names)))
    assert len({each.group_id for each in made}) == len({each.problem_id for each in made}) == 1
    for each in made:
        assert max(map(len, (each.rollout_uid, each.group_id, each.problem_id))) <= MAX_ID
    other = start("other", problem + "x")
    fold.at(3, other, call("a", [1], [2], session="other"), reward("other"))
    (another,) = rollouts(fold.at(4, end("other")))
    assert another.problem_id != made[0].problem_id
    assert another.group_id != made[0].group_id


def sessions_of(draw: random.Random) -> list[tuple[int, Record]]:
    """The records of some sessions with the seconds in which they come. No session waits for longer
    than it may, but for those that have no end, or no reward.
    """
    records = list[tuple[int, Record]]()
    for number in range(6):
        name = f"s{number}"
        second = draw.randrange(20)
        records.append((second, start(name, f"p{number}")))
        for turn in range(draw.randrange(1, 5)):
            second += draw.choice((1, 20, 80))
            before = f"{turn - 1}" if turn else ""
            records.append((second, call(f"{turn}", [1], [2], before, session=name)))
        if draw.random() < 0.7:
            records.append((second + 1, end(name)))
            if draw.random() < 0.7:
                records.append((second + draw.choice((1, 2, 40)), reward(name)))
    return sorted(records, key=lambda each: each[0])


def outcomes_of(
    records: list[tuple[int, Record]], away: range, clock_step_s: float
) -> dict[str, tuple[str, int, float]]:
    """What becomes of the sessions where the assembler is away in these seconds, and finds another
    time on the clock when it comes back.
    """
    fold = Fold()
    outputs = list[Output]()
    unread = list[Record]()
    for second in range(max(records[-1][0], away.stop) + 250):
        unread += [record for at, record in records if at == second]
        if second in away:
            continue
        time_s = 1e9 + second + (clock_step_s if second >= away.stop else 0.0)
        if second == away.stop:
            fold.state.clock.is_behind = True
            for record in unread:  # a poll for each, so that a limit could be looked at before it
                outputs += fold.at(time_s, record)
            fold.state.clock.is_behind = False
            unread.clear()
        made = fold.at(time_s, *unread)
        outputs += made
        unread = list(ends_of(made))
    return {
        each.rollout_uid: (each.failure, len(each.turns), each.reward) for each in rollouts(outputs)
    }


@pytest.mark.parametrize("seed", range(100))
def test_an_outage_or_a_step_of_the_clock_closes_nothing_that_would_not_have_closed(seed: int):
    draw = random.Random(seed)
    records = sessions_of(draw)
    begin = draw.randrange(records[-1][0])
    away = range(begin, begin + draw.choice((0, 5, 150, 1_000)))
    expected = outcomes_of(records, range(0), 0.0)
    assert len(expected) == 6
    assert outcomes_of(records, away, draw.choice((-1e6, 0.0, 400.0, 1e6))) == expected


def test_of_an_env_that_was_taken_out_a_session_fails_when_it_is_put_back():
    """Nothing is written meanwhile: the topics of the env may be gone."""
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]))
    without = type(fold.config)(envs={})
    state, out = reconcile(without, fold.state, {(f"turns.{ENV}", 0): 2**40}, 1)
    assert out == [] and list(held_events(state)) == []
    state, out = reconcile(fold.config, state, {}, 2)
    (failed,) = rollouts(out)
    assert (failed.rollout_uid, failed.problem_id, failed.failure) == ("s", "p", ENV_REMOVED)
    assert reconcile(fold.config, state, {}, 3)[1] == [], "once"


def test_a_rollout_has_the_number_of_sessions_that_its_group_waits_for():
    """Two sessions of a group and one of another are open; a failed rollout counts as well."""
    fold = Fold(rewards=[])
    fold.at(0, start("s"), start("t"), start("other"))
    ended = fold.at(1, call("a", [1], [2], session="s"), end("s"), reward("s"))
    assert [each.open_sessions for each in rollouts(ended)] == [1]
    ended = fold.at(2, end("t", failure="the tool has gone"))
    assert [each.open_sessions for each in rollouts(ended)] == [0]


def test_the_report_has_the_sessions_that_are_open_and_those_that_wait_for_rewards():
    fold = Fold(rewards=[])
    fold.at(0, start("s"), call("a", [1], [2]), end("s"), start("t"))
    values, warnings = report(fold.config, fold.state, 1.0)
    assert values == {
        f"assembler/open_sessions/{ENV}": 2.0,
        f"assembler/waiting_for_rewards/{ENV}": 1.0,
    }
    assert warnings == ()


def test_limits_are_checked_while_a_group_waits_for_sessions_and_none_is_open():
    fold = Fold(rewards=[])
    fold.at(0, start("s"), call("a", [1], [2]), end("s"), reward("s"))
    assert not fold.state.envs[ENV].open and fold.state.envs[ENV].groups
    assert due(fold.config, fold.state, 1.0)


def test_a_group_waits_for_its_next_session_as_long_as_one_may_take():
    """100 s without a call, and 50 s for the rewards."""
    fold = Fold()
    fold.at(0, start("s"), call("a", [1], [2]), end("s"), reward("s"))
    fold.wait(149)
    assert list(fold.state.envs[ENV].groups) == ["p"]
    fold.wait(3)
    assert not fold.state.envs[ENV].groups


def test_limits_are_checked_while_a_session_of_a_complete_group_is_open():
    fold = Fold(rewards=[])
    fold.at(0, start("s"), start("t"))
    assert fold.state.envs[ENV].open and not fold.state.envs[ENV].groups
    assert due(fold.config, fold.state, 1.0)


def test_limits_are_checked_once_a_second_of_the_clock():
    fold = Fold()
    fold.at(0.0, start("s"))
    checked = list[float]()
    for time_s in (0.4, 1.1, 1.6, 2.0, 2.2):
        fold.at(time_s)
        checked.append(fold.state.checked_s)
    assert checked == [0.0, 1.1, 1.1, 1.1, 2.2]


def test_sessions_that_are_open_and_those_of_them_that_have_ended_are_counted():
    fold = Fold()
    fold.at(0, start("a"), start("b"), start("c"))
    assert counts(fold.state.envs[ENV].open) == (3, 0)
    fold.state.envs[ENV].open["a"].end = Event("turns.agent", 0, 3, "a", end("a"))
    assert counts(fold.state.envs[ENV].open) == (3, 1)
