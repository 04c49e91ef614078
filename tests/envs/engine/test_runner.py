"""Conversations played to their end by a policy with a script: whose tokens are whose, and every
way that one can be cut short.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.api import (
    Completion,
    Message,
    MultiTurnEnv,
    Problem,
    RewardBreakdown,
)
from streamrl.envs.catalog import make_reward
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.inference.clients.client import SamplingFailed, SamplingTimeout
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records import Rollout
from streamrl.stream.records.sequences import completions, sampled_indices
from streamrl.system.errors import ConfigError
from tests.envs.talking import END, Scripted
from tests.support.build import rollout_event
from tests.support.groups import joined_group
from tests.support.waiting import patience

PROBLEM = Problem([{"role": "user", "content": "q"}], "yes", {"level": "easy"})


class Asking(MultiTurnEnv):
    """Replies `more` until it hears yes. A turn earns the length of what was said, the end 1 for
    yes.
    """

    def __init__(self, reply: Any = None) -> None:
        self.replied = reply
        self.completions: list[Completion] = []

    def problem(self, number: int) -> Problem:
        return PROBLEM

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Sequence[Message] | None:
        if self.replied is not None:
            return self.replied()
        return (
            None
            if messages[-1]["content"] == problem.answer
            else [{"role": "tool", "content": "more"}]
        )

    def rewards(self, problem: Problem, completion: Completion) -> RewardBreakdown:
        self.completions.append(completion)
        return RewardBreakdown(
            {"right": float(completion.text == problem.answer)},
            [{"length": len(said.text)} for said in completion.turns],
        )


def play(
    sampler: Scripted,
    env: Any = None,
    n: int = 1,
    rewards: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[Rollout]:
    settings = {"max_tokens": 9, "reward_weights": {"length": 0.125}, **settings}
    runner = RolloutRunner(env or Asking(), Env(**settings), sampler, rewards or {})
    made = asyncio.run(runner.run_group(Task("talk", 7, "talk-0", PROBLEM), n))
    assert all(encode(decode("rollout/1", encode(rollout))) == encode(rollout) for rollout in made)
    return made


def ids(text: str) -> list[int]:
    return [*map(ord, text), END]


def test_turns_go_on_from_the_very_tokens_sampled_and_replies_are_masked():
    sampler = Scripted("no", "maybe", "yes")
    one, _ = play(sampler, n=2)
    assert [
        (acquired.role, acquired.message, acquired.logprobs is not None, acquired.fork)
        for acquired in one.turns
    ] == [
        ("user", "q", False, False),
        ("assistant", "no", True, False),
        ("tool", "more", False, False),
        ("assistant", "maybe", True, False),
        ("tool", "more", False, False),
        ("assistant", "yes", True, False),
    ]
    whole = np.concatenate(
        [acquired.tokens for acquired in one.turns if acquired.tokens is not None]
    ).tolist()
    last = sampler.prompts[-1]
    # what the policy saw last is what the rollout says, sampled tokens in it as they were sampled
    assert whole[: len(last)] == last
    assert sampler.lasts == ["", *["s"] * 4]  # each turn asks for the server of the one before
    assert one.turns[2].tokens is not None and one.turns[2].tokens.tolist() == [*ids("more"), 1]
    assert (one.policy_version, one.newest_policy_version, one.truncated, one.failure) == (
        2,
        4,
        False,
        "",
    )
    record = joined_group([rollout_event(0, one)])
    assert len(record.policy_logprobs) == len("no") + len("maybe") + len("yes") + 3
    assert record.tokens[sampled_indices(record)].tolist() == [
        t for s in ("no", "maybe", "yes") for t in [*(ord(c) + 1000 for c in s), END]
    ]


def test_rewards_of_turns_are_weighted_and_credited_to_what_was_said_before_them():
    (made,) = play(Scripted("no", "yes"))
    assert made.rewards == {"right": 1.0, "length": 5.0} and made.reward == 1 + 5 / 8
    assert [
        (acquired.reward, acquired.rewards)
        for acquired in made.turns
        if acquired.logprobs is not None
    ] == [
        (0.25, {"length": 2}),
        (0.375, {"length": 3}),
    ]
    record = joined_group([rollout_event(0, made)], lambda rewards: rewards)
    # 3 tokens of the first turn, and 4 of the second
    assert record.token_advantages is not None
    assert record.token_advantages.tolist() == [1.625] * 3 + [1.375] * 4


def test_a_template_that_rewrites_history_forks_and_every_sampled_token_trains_once():
    sampler = Scripted("no", "maybe", "yes", rewrites=True)
    (made,) = play(sampler)
    assert [acquired.fork for acquired in made.turns] == [False, False, True, False, True, False]
    record = joined_group([rollout_event(0, made)])
    seen = [[*record.prompt, *after] for after in completions(record, record.tokens)]
    assert [tokens[: len(p)] for tokens, p in zip(seen, sampler.prompts, strict=True)] == (
        sampler.prompts
    )
    assert len(record.tokens) < sum(map(len, seen))  # what they share is there once
    assert record.uids == ["talk-7-0"] * 3
    assert record.tokens[sampled_indices(record)].tolist() == [
        t for s in ("no", "maybe", "yes") for t in [*(ord(c) + 1000 for c in s), END]
    ]


def test_it_is_one_sequence_where_history_is_kept():
    sampler = Scripted("no", "maybe", "yes", rewrites=True, keeps=True)
    (made,) = play(sampler)
    assert not any(turn.fork for turn in made.turns)
    record = joined_group([rollout_event(0, made)])
    assert record.uids == ["talk-7-0"] and len(sampler.prompts[2]) > len(sampler.prompts[1])


def broken() -> None:
    raise KeyError("no such tool")


@pytest.mark.parametrize(
    ("sampler", "env", "settings", "limit", "said"),
    [
        (Scripted("no", "maybe and more"), Asking(), {}, "length", 2),
        (Scripted("no", "no", "no"), Asking(), {"max_turns": 2}, "turns", 2),
        (Scripted("no", "no", context=10), Asking(), {}, "context", 1),
        (Scripted("no", SamplingTimeout("3 attempts failed")), Asking(), {}, "time", 1),
        (Scripted("no", 3600.0), Asking(), {"rollout_timeout_s": patience(1.0)}, "time", 1),
        (Scripted("no"), Asking(broken), {}, "tool-error", 1),
        (Scripted("no"), Asking(lambda: {"role": "tool"}), {}, "tool-error", 1),
    ],
    ids=["length", "turns", "context", "no answer", "time", "tool error", "no messages"],
)
def test_a_limit_ends_a_rollout_truncated_with_what_was_said(
    sampler: Scripted, env: Asking, settings: dict[str, Any], limit: str, said: int
):
    (made,) = play(sampler, env, **settings)
    assert (
        made.truncated
        and made.metadata["truncation"] == limit
        and made.metadata["level"] == "easy"
        and not made.failure
    )
    assert (
        sum(acquired.logprobs is not None for acquired in made.turns)
        == said
        == len(env.completions[0].turns)
    )
    assert not env.completions[0].finished and env.completions[0].truncation == limit


def test_a_tool_that_hangs_is_left_behind():
    go_on, env, ended = (
        threading.Event(),
        Asking(lambda: ended.append(go_on.wait(patience(60)))),
        list[bool](),
    )
    (made,) = play(Scripted("no"), env, env_timeout_s=1.0)
    assert (
        made.truncated
        and made.metadata["truncation"] == env.completions[0].truncation == "tool-time"
        and not made.failure
    )
    assert not ended
    go_on.set()


def test_a_server_that_fails_in_mid_conversation_is_a_failed_rollout_of_its_own():
    class Failing(Scripted):
        """Fails the second turn of the first rollout only."""

        failed = False

        async def sample(self, messages: list[Message], n: int, *more: Any) -> list[Any]:
            if len(messages) > 1 and not self.failed:
                self.failed = True
                raise SamplingFailed("s: engine gone")
            return await super().sample(messages, n, *more)

    made = play(Failing("no", "yes"), n=3)
    assert sorted(rollout.failure for rollout in made) == ["", "", "s: engine gone"] and {
        r.group_id for r in made
    } == {"talk-7"}


def test_a_first_turn_that_cannot_be_had_fails_the_group():
    with pytest.raises(SamplingFailed, match="engine gone"):
        play(Scripted(SamplingFailed("engine gone")), n=3)


def test_a_reply_may_be_a_coroutine_and_a_hanging_one_stalls_nobody():
    class Slow(Asking):
        async def reply(
            self, problem: Problem, messages: Sequence[Message]
        ) -> Sequence[Message] | None:  # type: ignore[override]
            await everybody.wait()
            return super().reply(problem, messages)

    # one by one nobody would come through
    everybody = asyncio.Barrier(20)
    both = threading.Barrier(2)
    made = play(Scripted("no", "yes"), Slow(), n=20)
    assert len(made) == 20 and not any(rollout.truncated for rollout in made)
    made = play(Scripted("no", "yes"), Asking(lambda: both.wait() and None), n=20)
    assert len(made) == 20 and not any(rollout.truncated for rollout in made)


def test_functions_of_the_run_file_add_their_rewards_the_later_seeing_the_earlier():
    async def brief(
        problem: Problem, answer: Completion, earned: Mapping[str, float]
    ) -> RewardBreakdown:
        return RewardBreakdown(
            tokens=[{"brief": [-1.0] * len(said.tokens)} for said in answer.turns]
        )

    def product(problem: Problem, answer: Completion, earned: Mapping[str, float]) -> float:
        return earned["right"] * earned["length"] + earned["brief"]

    weights = {"right": 0.0, "length": 0.0, "brief": 0.125, "product": 1.0}
    (made,) = play(
        Scripted("no", "yes"), rewards={"brief": brief, "product": product}, reward_weights=weights
    )
    assert made.rewards == {"right": 1.0, "length": 5.0, "brief": -7.0, "product": -2.0}
    assert made.reward == -7 / 8 - 2
    assert [t.token_rewards.tolist() for t in made.turns if t.token_rewards is not None] == [
        [-0.125] * 3,
        [-0.125] * 4,
    ]
    for function, says in (
        (lambda *_: {"right": 1.0}, "two reward functions give 'right'"),
        (lambda *_: float("nan"), "not finite"),
    ):
        (made,) = play(Scripted("yes"), rewards={"odd": function})
        assert says in made.failure


def test_rewards_that_take_too_long_fail_the_rollout():
    async def forever(*_: object) -> float:
        await asyncio.sleep(60)
        return 1.0

    (made,) = play(Scripted("yes"), rewards={"slow": forever}, env_timeout_s=0.2)
    assert "reward 'slow' took longer than 0.2 s" in made.failure


def test_a_composed_reward_by_import_path(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Brief:\n    def __init__(self, most: int): self.most = most\n    def __call__(self,"
        " problem, answer, earned): return earned['right'] * (len(answer.text) <= self.most)\ndef"
        " fixed(problem, answer, earned): return 1.0\nnumber = 3\n"
    )
    composed = make_reward(f"{file}:Brief", {"most": 3}, "envs.x.rewards.brief")
    (made,) = play(Scripted("no", "yes"), rewards={"brief": composed})
    assert made.rewards["brief"] == 1.0
    assert make_reward(f"{file}:fixed", {}, "w")(PROBLEM, Completion("", True), {}) == 1.0
    for kind, params, says in (
        (
            "math-verfy",
            {},
            "reward 'math-verfy' not found; there are math-verify, judge; did you mean",
        ),
        (f"{file}:Brief", {"mot": 3}, "takes no 'mot'; did you mean 'most'"),
        (f"{file}:fixed", {"most": 3}, "is a function and takes none"),
        (f"{file}:number", {}, "is no function"),
        (f"{file}:nothing", {}, "is no function"),
    ):
        with pytest.raises(ConfigError, match=f"^envs.x.rewards.brief.*{says}"):
            make_reward(kind, params, "envs.x.rewards.brief")
