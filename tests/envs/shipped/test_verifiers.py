"""Environments of verifiers, as their authors write them (`guests.py`), under our conversations,
with a policy that plays by a script.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import Env
from streamrl.envs.catalog import make_env
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.errors import ConfigError
from streamrl.inference.client import SamplingFailed
from streamrl.records import Rollout
from tests.envs.talking import END, Scripted

KIND = "verifiers:tests.envs.guests"
CALL = '<tool_call>{"name": "double", "arguments": {"number": "21"}}</tool_call>'


def shipped() -> ModuleType:
    """The module that is tested. It takes 5 s to import: not in every worker of the tests."""
    return importlib.import_module("streamrl.envs.shipped.verifiers")


def guest(which: str, tool_syntax: str = "json", **params: Any) -> Any:
    return make_env(KIND, 1, {"which": which, **params}, "envs.x", tool_syntax)


def play(env: Any, sampler: Any, n: int = 1, **settings: Any) -> list[Rollout]:
    runner = RolloutRunner(env, Env(max_tokens=200, **settings), sampler)
    return asyncio.run(runner.run_group(Task("x", 0, "x-0", env.problem(0)), n))


def one(
    env: Any, *says: Any, rewrites: bool = False, context: int = 10_000, **settings: Any
) -> Rollout:
    (made,) = play(env, Scripted(*says, rewrites=rewrites, context=context), **settings)
    assert not made.failure, made.failure
    return made


def texts(rollout: Rollout) -> list[tuple[str, str]]:
    return [(turn.role, turn.message) for turn in rollout.turns]


def test_problems_are_the_rows_each_epoch_in_another_order_and_the_same_in_every_process():
    env = guest("single", rows=5)
    again = guest("single", rows=5)
    other = make_env(KIND, 2, {"rows": 5}, "envs.x")
    found = [env.problem(i).metadata["example_id"] for i in range(15)]
    assert [sorted(found[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(found[i : i + 5]) for i in (0, 5, 10)}) > 1
    assert (
        found
        == [again.problem(i).metadata["example_id"] for i in range(15)]
        != [other.problem(i).metadata["example_id"] for i in range(15)]
    )
    first = env.problem(0)
    assert first.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": f"q{found[0]}"},
    ]


def test_a_single_turn_is_scored_by_its_rubric_whose_functions_are_named_rewards():
    env = guest("single")
    answer = env.problem(0).answer["answer"]
    made = one(env, answer)
    assert texts(made)[1] == ("assistant", answer)
    assert made.rewards == {
        "rubric": pytest.approx(0.9),
        "right": 1.0,
        "brief": 0.5,
        "num_turns": 1.0,
    }
    assert (
        made.reward == pytest.approx(0.9)
        and not made.truncated
        and made.metadata["example_id"] == env.problem(0).answer["example_id"]
    )


def test_weights_of_the_run_file_replace_the_rubric():
    env = guest("single")
    made = one(env, env.problem(0).answer["answer"], reward_weights={"rubric": 0.0, "brief": 4.0})
    assert made.reward == pytest.approx(2.0) and made.rewards["rubric"] == pytest.approx(0.9)


def test_tokens_and_logprobs_are_those_that_were_sampled():
    """Sampled ids are others than the same text has in a prompt, so a history that was tokenised
    again would show.
    """
    made = one(guest("turns"), "one", "two")
    asked, first, left, second = made.turns
    assert texts(made)[1:] == [("assistant", "one"), ("user", "left 1"), ("assistant", "two")]
    assert [t.tolist() for t in (first.tokens, second.tokens)] == [
        [ord(c) + 1000 for c in said] + [END] for said in ("one", "two")
    ]
    assert left.tokens.tolist() == [*map(ord, "left 1"), END, 1] and not left.fork
    assert [turn.logprobs is None for turn in made.turns] == [True, False, True, False]
    assert first.logprobs.tolist() == [-0.5] * 4 and asked.tokens is not None
    # two turns of four tokens at -0.5 each: the library has the same ones
    assert (
        made.rewards == {"rubric": 2.0, "heard": 2.0, "logprob": -4.0, "num_turns": 2.0}
        and made.reward == 2.0
    )
    assert (made.policy_version, made.newest_policy_version, made.truncated) == (2, 3, False)


def test_a_template_that_rewrites_forks():
    made = one(guest("turns"), "one", "two", rewrites=True)
    assert [turn.fork for turn in made.turns] == [False, False, True, False]


class Asked(Scripted):
    """Notes the messages and tools that it is asked with."""

    def __init__(self, *says: Any) -> None:
        super().__init__(*says)
        self.asked: list[tuple[list[Any], Sequence[Mapping[str, Any]], int]] = []

    async def sample(self, messages: Any, n: int, env: Any, tools: Any = (), *more: Any) -> Any:
        self.asked.append((list(messages), tools, n))
        return await super().sample(messages, n, env, tools, *more)


def test_tools_are_called_and_a_call_stays_what_was_said():
    env = guest("tool")
    policy = Asked(f"so {CALL}", "42")
    (made,) = play(env, policy)
    assert texts(made)[1:] == [("assistant", f"so {CALL}"), ("tool", "42"), ("assistant", "42")]
    assert {
        name: made.rewards[name] for name in ("total_tool_calls", "double_calls", "num_turns")
    } == {
        "total_tool_calls": 1.0,
        "double_calls": 1.0,
        "num_turns": 2.0,
    }
    messages, functions, _ = policy.asked[1]
    assert messages[1] == {"role": "assistant", "content": f"so {CALL}"}
    assert functions == env.problem(0).tools and functions[0]["function"]["name"] == "double"
    assert not made.turns[2].fork


def test_tools_in_brackets_and_in_a_syntax_of_ones_own():
    assert texts(one(guest("tool", "brackets"), "[4]", "8"))[2] == ("tool", "8")
    own = guest("tool", "tests.envs.shipped.test_verifiers:own_syntax")
    assert texts(one(own, "please 5", "10"))[2] == ("tool", "10")


def own_syntax(text: str, functions: Sequence[Mapping[str, Any]]) -> Any:
    return shipped().in_brackets(f"[{text.split()[1]}]" if " " in text else text, functions)


def test_a_call_that_cannot_be_read_is_text_and_one_that_fails_is_answered():
    assert len(one(guest("tool"), "<tool_call>{</tool_call>").turns) == 2
    made = one(guest("tool"), CALL.replace("21", "x"), "sorry")
    assert made.turns[2].role == "tool" and "invalid literal" in made.turns[2].message
    assert shipped().in_json(CALL, []) == (CALL, [])  # without tools there are no calls


def test_rewards_of_a_group_are_given_together_and_its_first_turn_is_one_request():
    policy = Varied("b", "c", "a")
    made = play(guest("together"), policy, n=3)
    assert (
        [rollout.rewards["rank"] for rollout in made]
        == [rollout.reward for rollout in made]
        == [1.0, 2.0, 0.0]
    )
    assert [n for *_, n in policy.asked] == [3]


class Varied(Asked):
    """Answer i of a request is `says[i]`; an exception is what comes of the request behind the
    first.
    """

    async def sample(self, messages: Any, n: int, env: Any, tools: Any = (), *more: Any) -> Any:
        says = self.says
        found = []
        for said in says[:n]:
            self.says = (said, *says[n:])
            found += await super().sample(messages, 1, env, tools, *more)
        self.says, self.asked = says, [*self.asked[: -len(found)], (list(messages), tools, n)]
        return found


@pytest.mark.parametrize(
    ("env", "settings", "says", "truncation"),
    [
        ({"which": "stuck"}, {"rollout_timeout_s": 1.0}, ["one"], "time"),
        ({"which": "stuck", "timeout_seconds": 1.0}, {}, ["one"], "time"),
        ({"which": "stuck", "how": "error"}, {}, ["one"], "tool-error"),
        ({"which": "stuck", "how": "other"}, {}, ["one"], "tool-error"),
        ({"which": "turns"}, {"max_turns": 1}, ["one", "two"], "turns"),
        ({"which": "single"}, {}, ["x" * 300], "length"),
    ],
)
def test_a_limit_ends_a_rollout_truncated_and_judged(
    env: dict[str, Any], settings: dict[str, Any], says: list[str], truncation: str
):
    made = one(guest(**env), *says, **settings)
    assert made.truncated and made.metadata["truncation"] == truncation and "rubric" in made.rewards
    assert sum(turn.logprobs is not None for turn in made.turns) == 1


def test_a_context_that_is_full_ends_a_rollout_truncated():
    made = one(guest("turns"), "one", "two", context=12)
    assert made.metadata["truncation"] == "context" and made.rewards["heard"] == 1.0


def test_what_cannot_be_sampled_is_a_failure_and_the_others_are_judged_without_it():
    made = play(guest("turns"), Fails("one", "two"), n=2)
    assert sorted(rollout.failure for rollout in made) == ["", "the server is gone"]
    assert [rollout.reward for rollout in made if not rollout.failure] == [2.0]
    with pytest.raises(SamplingFailed, match="no server"):
        play(guest("single"), Scripted(SamplingFailed("no server")), n=2)


class Fails(Scripted):
    """The second of two rollouts has no second turn."""

    seconds = 0

    async def sample(self, messages: Any, n: int, env: Any, *more: Any) -> Any:
        self.seconds += n == 1
        if self.seconds == 2:
            raise SamplingFailed("the server is gone")
        return await super().sample(messages, n, env, *more)


def test_a_rubric_function_that_raises_fails_the_rollout():
    """The library counts 0 for it: a reward that nobody has given."""
    assert one(guest("stuck", how="error", timeout_seconds=5), "one").rewards["rubric"] == 1.0
    env = guest("single")
    env.env.rubric.rubrics[0].funcs[0] = broken
    (made,) = play(env, Scripted("x"))
    assert (
        made.failure == "RuntimeError: reward function broken: ZeroDivisionError:"
        and made.reward == 0.0
    )


def broken(completion: Any) -> float:
    raise ZeroDivisionError


def test_a_function_called_as_the_total_is_refused():
    env = guest("single")
    env.env.rubric.add_metric(rubric)
    (made,) = play(env, Scripted("x"))
    assert "give it another name" in made.failure


def rubric() -> float:
    return 1.0


@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        ("verifiers:tests.envs.no_such", {}, "cannot be loaded"),
        ("verifiers:tests.envs.talking", {}, "tests.envs.talking has no load_environment"),
        (KIND, {"which": "nothing"}, "gives no verifiers.Environment but dict"),
        (KIND, {"which": "single", "rows": 0}, "is empty"),
        (
            KIND,
            {"which": "single", "max_workers": "x", "eval_dataset": 1, "rubric": 2},
            "refuses them",
        ),
    ],
)
def test_what_is_wrong_with_one_is_said_in_a_line(kind: str, params: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=f"^envs.x.*{says}"):
        make_env(kind, 1, params, "envs.x")


def test_without_the_library_that_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "streamrl.envs.shipped.verifiers", None)
    with pytest.raises(
        ConfigError,
        match=(
            r"^envs.x: verifiers:quiz needs the library verifiers, as streamrl\[envs\] installs it"
        ),
    ):
        make_env("verifiers:quiz", 1, {}, "envs.x")


def test_the_process_keeps_its_signals():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert isinstance(guest("single"), shipped().Verifiers)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_tool_syntax_is_for_them_alone():
    with pytest.raises(ValueError, match="envs.a.tool_syntax is for envs of kind verifiers"):
        RunFile.model_validate(
            {"run": "r", "envs": {"a": {"kind": "calculator", "tool_syntax": "brackets"}}}
        )
    with pytest.raises(ConfigError, match="envs.x.tool_syntax"):
        guest("tool", "bracket")


def test_a_history_that_the_env_rewrites_is_another_sequence():
    """Half of what was said is taken back, as compaction does."""
    env = guest("turns", rows=1)

    async def forgetful(state: Any) -> Any:
        if not state["trajectory"]:
            return state["prompt"]
        state["heard"].append("")
        state["left"] -= 2
        return [
            *state["prompt"],
            {"role": "assistant", "content": "o"},
            {"role": "user", "content": "again"},
        ]

    env.env.get_prompt_messages = forgetful
    made = one(env, "one", "two", rewrites=True)
    assert [turn.fork for turn in made.turns] == [False, False, True, False]
    assert made.turns[2].tokens.tolist() == [
        *map(ord, "q0"),
        END,
        ord("o"),
        END,
        *map(ord, "again"),
        END,
        1,
    ]
    assert made.turns[2].message == "q0\no\nagain"


@pytest.mark.parametrize(
    ("sort", "says", "rewards"),
    [
        (
            "single-turn",
            ["{answer}"],
            {"first": 1.0, "exact": 1.0, "rubric": 1.0, "num_turns": 1.0},
        ),
        (
            "multi-turn",
            ["=", "{answer}"],
            {"found": 1.0, "numbers": 0.5, "rubric": 0.85, "num_turns": 2.0},
        ),
        (
            "multi-turn",
            ["=", "=", "="],
            {"found": 0.0, "numbers": 0.0, "rubric": 0.0, "num_turns": 3.0},
        ),
        (
            "tool",
            ["[{digit}]", "{answer}"],
            {"called": 1.0, "answered": 1.0, "rubric": 1.0, "num_turns": 2.0},
        ),
        ("tool", ["[{digit}="], {"called": 0.5, "answered": 0.0, "rubric": 0.25, "num_turns": 1.0}),
    ],
)
def test_those_that_ship_as_an_example(sort: str, says: list[str], rewards: dict[str, float]):
    env = make_env("verifiers:examples/verifiers_envs.py", 1, {"sort": sort}, "envs.x", "brackets")
    row = env.problem(0).answer
    made = one(env, *[said.format(answer=row["answer"], digit=row["question"][0]) for said in says])
    assert {
        name: value for name, value in made.rewards.items() if name in rewards
    } == pytest.approx(rewards)
    assert made.reward == pytest.approx(rewards["rubric"])


class Differing(Scripted):
    """Says another thing in each rollout."""

    async def sample(self, messages: Any, n: int, env: Any, *more: Any) -> Any:
        return [(await Scripted(said).sample(messages, 1, env, *more))[0] for said in self.says]


def test_only_the_rollout_that_a_function_raised_for_fails_unless_it_judges_all():
    made = play(guest("raises"), Differing("1", "two", "3"), n=3)
    assert [rollout.reward for rollout in made if not rollout.failure] == [1.0, 3.0]
    assert made[1].failure.startswith(
        "RuntimeError: reward function number: ValueError: could not convert string to float: 'two'"
    )
    together = play(guest("raises", together=True), Differing("1", "two"), n=2)
    assert [rollout.failure[:38] for rollout in together] == [
        "RuntimeError: reward function longest:"
    ] * 2
