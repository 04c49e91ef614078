"""Which rewards count: the gateway, which answers the sender of one, and the assembler agree."""

from __future__ import annotations

import random

import pytest

from streamrl.envs.sessions.keys import SessionName
from streamrl.envs.sessions.reward_progress import RewardProgress
from streamrl.extensions.gateway.session_index import SessionIndex
from streamrl.stream.records import Record, Reward, Rollout
from tests.extensions.assembler.test_session_assembler import Fold
from tests.support.sessions import ENV, call, end, reward, start


def progress_of(*rewards: Reward) -> RewardProgress:
    progress = RewardProgress()
    for each in rewards:
        progress.add(each)
    return progress


def test_a_reward_of_a_new_name_has_no_problem():
    assert RewardProgress().problem(reward("s", name="style")) == ""
    assert progress_of(reward("s")).problem(reward("s", name="style")) == ""


def test_before_the_end_nothing_is_complete():
    assert not progress_of(reward("s")).is_complete([])


def test_what_came_before_the_end_is_enough():
    progress = progress_of(reward("s", call="a"))
    progress.end(["a", "b"], failure="")
    assert progress.is_complete([]) and progress.is_complete(["reward"])
    assert not progress.is_complete(["reward", "style"])


def test_after_the_end_each_call_needs_a_reward_or_the_rollout_one():
    progress = progress_of()
    progress.end(["a", "b"], failure="")
    progress.add(reward("s", call="a"))
    progress.add(reward("s", call="unknown"))
    assert not progress.is_complete([])
    progress.add(reward("s", call="b", name="style"))
    assert progress.is_complete([]) and not progress.is_complete(["style"])
    progress.add(reward("s", name="style"))
    assert progress.is_complete(["style"])


def test_a_failure_waits_for_nothing_unless_a_later_reward_replaces_it():
    progress = progress_of()
    progress.end(["a"], failure="")
    progress.add(reward("s", name="x", failure="timed out"))
    assert progress.is_complete(["answer"])
    progress.add(reward("s", name="x"))
    assert not progress.is_complete(["answer"])
    failed = progress_of()
    failed.end([], failure="no disk")
    assert failed.is_complete(["answer"])


def test_without_more_rewards_a_rollout_needs_one_of_each_wanted_name_or_a_failure():
    none = progress_of()
    assert not none.has_any_of_each([]) and not none.has_any_of_each(["x"])
    one = progress_of(reward("s", name="x", call="a"))
    assert one.has_any_of_each([]) and one.has_any_of_each(["x"])
    assert not one.has_any_of_each(["x", "y"])
    assert progress_of(reward("s", name="x", failure="timed out")).has_any_of_each(["y"])


def test_a_session_without_answers_waits_for_a_reward_of_the_rollout():
    progress = progress_of()
    progress.end([], failure="")
    assert not progress.is_complete([])
    progress.add(reward("s"))
    assert progress.is_complete([])


def test_a_reward_beyond_the_most_is_refused_and_one_that_is_sent_again_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("streamrl.envs.sessions.reward_progress.MAX_REWARDS", 2)
    progress = progress_of(reward("s", call="a"))
    assert progress.problem(reward("s", call="b")) == ""
    progress.add(reward("s", call="b"))
    assert progress.problem(reward("s", call="b")) == ""
    assert progress.problem(reward("s", call="c")) == "it has 2 rewards, which is the most"


@pytest.mark.parametrize("wanted", [[], ["a"], ["a", "b"]])
@pytest.mark.parametrize("seed", range(100))
def test_a_reward_that_the_gateway_confirmed_is_in_the_rollout(seed: int, wanted: list[str]):
    """In whatever order calls, rewards and ends come into the session's partition."""
    draw = random.Random(seed)
    records: list[Record] = [
        call("1", [1], [2]),
        call("2", [3], [4], "1"),
        call("3", [1], [2], trained=False),
        call("4", [5], [6], lost=True),
        end("s"),
        *(
            reward("s", 2.0**place, draw.choice("ab"), call=draw.choice(["", "1", "2", "3"]))
            for place in range(8)
        ),
    ]
    draw.shuffle(records)
    index = SessionIndex({ENV: wanted})
    fold = Fold(rewards=wanted)
    confirmed = dict[tuple[str, str], float]()
    made = list[Rollout]()
    for record in (start("s"), *records, end("s", is_last=True)):
        rewards = index.rewards_of(SessionName(ENV, "s"))
        index.apply(ENV, record)
        if isinstance(record, Reward) and rewards is not None and record in rewards.counted:
            confirmed[record.name, record.call] = record.value
        outputs = fold.at(fold.offset, record)
        made += [each.record for each in outputs if isinstance(each.record, Rollout)]
    (rollout,) = made
    assert SessionName(ENV, "s") in index.closed
    if rollout.failure:
        causes = ("is not there", "did not come", "before the policy", "none of its answers")
        assert any(cause in rollout.failure for cause in causes)
    else:
        assert rollout.reward == sum(confirmed.values())
