"""The envs that talk, choose and code: every rule by hand, and whole conversations with a policy
that plays by a script.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config import run_file
from streamrl.envs.api import Completion, PolicyTurn, Problem, RewardBreakdown
from streamrl.envs.catalog import make_env
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.envs.shipped import arithmetic
from streamrl.envs.shipped.coding import Coding, program_in
from streamrl.envs.shipped.guess_number import GuessNumber, remaining_range
from streamrl.envs.shipped.multiple_choice import chosen_letter
from streamrl.envs.shipped.tools import parse_calls
from streamrl.errors import ConfigError
from streamrl.inference.client import Client
from streamrl.records import Rollout
from tests.envs.talking import Scripted
from tests.inference.stub import Stub
from tests.support.waiting import patience


def play(
    kind: str, params: dict[str, Any], *says: str, problem: int = 0, **settings: Any
) -> Rollout:
    env: Any = make_env(kind, 1, params, "envs.x")
    runner = RolloutRunner(env, run_file.Env(max_tokens=200, **settings), Scripted(*says))
    (made,) = asyncio.run(runner.run_group(Task("x", problem, "x-0", env.problem(problem)), 1))
    assert not made.failure, made.failure
    return made


def texts(rollout: Rollout) -> list[tuple[str, str]]:
    return [(turn.role, turn.message) for turn in rollout.turns[1:]]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*4", 12),
        (" -(2+3)*4 - 1", -21),
        ("10**9", None),
        ("1/2", None),
        ("3*", None),
        ("__import__('os')", None),
        ("True", None),
    ],
)
def test_arithmetic(expression: str, value: int | None):
    if value is not None:
        assert arithmetic.value(expression) == value
        return
    with pytest.raises(ValueError, match="expression|only whole numbers"):
        arithmetic.value(expression)


@pytest.mark.parametrize(
    "expression", ["*".join(["9"] * 90), "(" * 150 + "1" + ")" * 150 + "1" * 150, "9" * 30]
)
def test_arithmetic_stays_small(expression: str):
    with pytest.raises(ValueError, match="too l"):
        arithmetic.value(expression)


def test_calls_in_either_syntax():
    json_call = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'
    )
    assert [
        (c.name, c.arguments) for c in parse_calls(f"I see. {json_call}{json_call}", "json", "", "")
    ] == [("calculator", {"expression": "3*4"})] * 2
    assert [
        c.error
        for c in parse_calls("<tool_call>{]</tool_call><tool_call>[1]</tool_call>", "json", "", "")
    ][1].startswith("a call is {")
    assert [c.arguments for c in parse_calls("[3*4]", "brackets", "calculator", "expression")] == [
        {"expression": "3*4"}
    ]
    assert (
        parse_calls("3*4", "brackets", "c", "e")
        == parse_calls("[]", "brackets", "c", "e")
        == parse_calls("so [3*4]", "brackets", "c", "e")
        == []
    )


def a_call(expression: str, name: str = "calculator") -> str:
    return (
        f'<tool_call>{{"name": "{name}", "arguments": {{"expression":'
        f' "{expression}"}}}}</tool_call>'
    )


def test_the_calculator_with_json_calls():
    problem = make_env("calculator", 1, {}, "envs.x").problem(0)
    made = play("calculator", {}, a_call(problem.metadata["expression"]), problem.answer)
    assert texts(made) == [
        ("assistant", a_call(problem.metadata["expression"])),
        ("tool", problem.answer),
        ("assistant", problem.answer),
    ]
    assert (
        made.rewards == {"answer": 1.0, "call": 1.0}
        and not made.truncated
        and problem.tools[0]["function"]["name"] == "calculator"
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (a_call("1//"), "error: not an expression"),
        (a_call("9**9**9"), "error: only whole numbers"),
        (a_call("1", "python"), "error: there is no tool 'python' that takes expression"),
        ("<tool_call>{</tool_call>", "error: not JSON"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_and_the_conversation_goes_on(call: str, says: str):
    made = play("calculator", {}, call, "no idea")
    assert (
        made.turns[2].message.startswith(says)
        and made.rewards == {"answer": 0.0, "call": 0.0}
        and not made.truncated
    )


def test_an_answer_without_a_call_or_with_no_end_of_calls_earns_nothing():
    problem = make_env("calculator", 1, {}, "envs.x").problem(0)
    assert play("calculator", {}, problem.answer).rewards == {"answer": 0.0}
    endless = play("calculator", {}, *[a_call("1")] * 3, max_turns=2)
    assert (
        endless.truncated
        and endless.metadata["truncation"] == "turns"
        and endless.rewards == {"answer": 0.0, "call": 2.0}
    )


def test_the_calculator_in_brackets_judges_positions():
    params = {"syntax": "brackets"}
    problem = make_env("calculator", 1, params, "envs.x").problem(0)
    expression = problem.metadata["expression"]
    assert play("calculator", params, f"[{expression}]", problem.answer).rewards == {
        "answer": 1.0,
        "call": 1.0,
    }
    # no brackets: no call, and every position is off by one
    wrong = play("calculator", params, f"{expression}")
    assert wrong.rewards == {"answer": 0.0, "call": 0.0} and len(wrong.turns) == 2
    # 5 of 6 positions of the call; its end and none of the answer's digits
    part = play("calculator", params, f"[{expression[:2]}0]", "?")
    assert part.rewards["call"] == pytest.approx(5 / 6) and part.turns[2].message not in ("", "?")


def test_guessing_by_halves_finds_it_and_every_guess_is_worth_what_it_rules_out():
    env = GuessNumber(seed=1, lowest=0, highest=6, guesses=3)
    index = next(i for i in range(50) if env.problem(i).answer == 4)
    made = play("guess-number", {"highest": 6, "guesses": 3}, "3", "5", "4", problem=index)
    assert texts(made) == [
        ("assistant", "3"),
        ("user", ">"),
        ("assistant", "5"),
        ("user", "<"),
        ("assistant", "4"),
    ]
    # of 0..6: 3 leaves 4..6 (4 of 6 ruled out), 5 leaves 4 (2 of 6)
    assert [
        turn.rewards["narrowed"] for turn in made.turns if turn.logprobs is not None
    ] == pytest.approx([4 / 6, 2 / 6, 0])
    assert made.rewards == pytest.approx({"found": 1.0, "narrowed": 1.0}) and not made.truncated


def test_guesses_that_say_nothing_are_told_so_and_run_out():
    env = GuessNumber(seed=1, lowest=0, highest=6, guesses=3)
    index = next(i for i in range(50) if env.problem(i).answer == 4)
    made = play("guess-number", {"highest": 6, "guesses": 3}, "<", "3", "3", problem=index)
    assert texts(made)[1::2] == [("user", "?"), ("user", ">")] and made.rewards == pytest.approx(
        {"found": 0.0, "narrowed": 4 / 6}
    )


@pytest.mark.parametrize(
    ("guess", "range_"),
    [
        ("3", (4, 6)),
        ("5", (0, 4)),
        ("4", (4, 4)),
        ("0", (1, 6)),
        ("9", (0, 6)),
        ("x", (0, 6)),
        ("", (0, 6)),
    ],
)
def test_what_is_left_after_a_guess_when_it_is_4_of_0_to_6(guess: str, range_: tuple[int, int]):
    assert remaining_range(0, 6, 4, guess) == range_


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("The answer is C.", "C"),
        ("(A) no: D)", "D"),
        ("banana", ""),
        ("I'd say B", "B"),
        ("", ""),
    ],
)
def test_the_letter_that_was_chosen(text: str, letter: str):
    assert chosen_letter(text) == letter


def test_choices_are_shuffled_and_the_right_one_keeps_its_letter(tmp_path: Path):
    file = tmp_path / "questions.jsonl"
    file.write_text(
        json.dumps(
            {"question": "Capital of France?", "choices": ["Rome", "Paris", "Oslo"], "answer": 1}
        )
        + "\n\n"
    )
    env = make_env("multiple-choice", 0, {"file": str(file)}, "envs.x")
    for index in range(10):
        problem = env.problem(index)
        assert f"{problem.answer}) Paris" in problem.messages[0]["content"].splitlines()
        assert env.rewards(problem, Completion(problem.answer, True)) == {"correct": 1.0}
    assert len({env.problem(i).answer for i in range(20)}) == 3
    sums = make_env("multiple-choice", 0, {}, "envs.x").problem(3)
    question, *choices = sums.messages[0]["content"].splitlines()
    one, other = (int(n) for n in question.removesuffix("=?").split("+"))
    assert f"{sums.answer}) {one + other}" in choices and len({c[3:] for c in choices}) == 4


@pytest.mark.parametrize(
    ("kind", "line", "says"),
    [
        ("multiple-choice", "{}", ":1: not a question with choices and an answer .KeyError"),
        (
            "multiple-choice",
            '{"question": "q", "choices": ["a", "b"], "answer": 2}',
            ":1: 2 choices and answer 2",
        ),
        ("multiple-choice", "", "has no questions"),
        ("coding", '{"prompt": "f"}', ":1: not a prompt with tests"),
        ("coding", '{"prompt": "f", "tests": []}', ":1: no tests"),
        ("coding", None, "cannot be read .No such file"),
    ],
)
def test_a_file_that_is_none_is_named(kind: str, line: str | None, says: str, tmp_path: Path):
    file = tmp_path / "file.jsonl"
    if line is not None:
        file.write_text(line)
    with pytest.raises(ConfigError, match=f"^envs.x.params: {kind} refuses them.*{says}"):
        make_env(kind, 0, {"file": str(file)}, "envs.x")


RIGHT = {
    "x * ": "x * {a} + {b}",
    "the larger": "max(x + {a}, {b} * x)",
    "the sum": "sum(range({a}, {a} + x + 1))",
    "the remainder": "(x + {a}) % {b}",
    "how many": "len(str(x * {a}))",
}


def judged(env: Coding, problem: Problem, text: str) -> dict[str, float]:
    return dict(asyncio.run(env.rewards(problem, Completion(text, True))).rollout)


def test_code_is_run_against_the_tests_of_its_problem():
    env: Any = make_env("coding", 0, {}, "envs.x")
    problem = env.problem(0)._replace(
        answer=["assert f(1) == 5", "assert f(2) == 8", "assert f('a') == 'aaa2'"]
    )
    assert judged(
        env, problem, "So:\n```python\ndef f(x):\n    return 3 * x + 2\n```\nThat is it."
    ) == {"passed": 2 / 3, "ran": 1.0}
    assert judged(env, problem, "def f(x): return 5") == {"passed": 1 / 3, "ran": 1.0}
    assert judged(env, problem, "def f(x) return 5") == {"passed": 0.0, "ran": 0.0}
    assert judged(env, problem, "") == {"passed": 0.0, "ran": 1.0}


def test_its_own_problems_have_right_answers():
    env: Any = make_env("coding", 0, {}, "envs.x")
    seen = set[str]()
    for index in range(40):
        problem = env.problem(index)
        content = problem.messages[0]["content"]
        start = next(
            start
            for start in RIGHT
            if content.startswith(f"Write a Python function f(x) that returns {start}")
        )
        if start in seen:
            continue
        seen.add(start)
        # the last is "at least 0"
        numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in content).split()][:-1]
        a = numbers[0]
        b = numbers[-1]
        assert (
            judged(env, problem, f"def f(x): return {RIGHT[start].format(a=a, b=b)}")["passed"]
            == 1.0
        ), content
    assert seen == set(RIGHT)


def test_code_that_never_ends_is_over_in_time_and_does_not_stall_the_others():
    async def both() -> list[RewardBreakdown]:
        env = Coding(seed=0, timeout_s=1.0)
        problem = Problem([], ["assert f(1) == 1"])
        return await asyncio.gather(
            *[
                env.rewards(problem, Completion(text, True))
                for text in ("while True: pass", "def f(x): return x")
            ]
        )

    assert [earned.rollout for earned in asyncio.run(both())] == [
        {"passed": 0.0, "ran": 0.0},
        {"passed": 1.0, "ran": 1.0},
    ]


TRIES = (
    "def f(x): return 3 // (x - 1)",
    "def f(x): return 7",
    "```python\ndef f(x): return 3 * x + 1\n```",
    "never asked for",
)


class Coder(Stub):
    """A server whose policy says one after the other."""

    def choice(self, index: int) -> dict[str, Any]:
        turn = sum(path.endswith("/generate") for path, _ in self.asked) - 1
        return {**super().choice(index), "text": TRIES[turn]}


def test_a_program_that_fails_is_run_answered_with_its_failure_and_tried_again(tmp_path: Path):
    """Over HTTP: three attempts, of which none, the second test and both are right."""
    file = tmp_path / "problems.jsonl"
    file.write_text(
        json.dumps({"prompt": "Write f", "tests": ["assert f(1) == 4", "assert f(2) == 7"]})
    )
    env: Any = make_env(
        "coding", 0, {"file": str(file), "attempts": 4, "timeout_s": patience(5)}, "envs.x"
    )

    async def played() -> Rollout:
        client = Client()
        client.on_server("coder", server.record())
        try:
            settings = run_file.Env(
                max_tokens=200,
                max_turns=8,
                reward_weights={"gained": 1.0, "passed": 0.0, "ran": 0.0},
            )
            (made,) = await RolloutRunner(env, settings, client).run_group(
                Task("x", 0, "x-0", env.problem(0)), 1
            )
        finally:
            await client.close()
        return made

    with Coder("coder") as server:
        made = asyncio.run(played())
    assert not made.failure and not made.truncated, made
    first, second = (turn.message for turn in made.turns[2::2])
    assert [turn.role for turn in made.turns] == ["user", "assistant"] * 3 and [
        turn.message for turn in made.turns[1::2]
    ] == list(TRIES[:3])
    assert (
        first.startswith("2 of 2 tests failed: 1, 2.")
        and "ZeroDivisionError" in first
        and "line 1, in f" in first
    )
    assert second == "1 of 2 tests failed: 1.\nCorrect the program."
    # what a test expects is not told
    assert not any("== 4" in text or "== 7" in text for text in (first, second))
    assert made.rewards == {"passed": 1.0, "ran": 1.0, "gained": 1.0} and made.reward == 1.0
    assert [turn.reward for turn in made.turns[1::2]] == [None, 0.5, 0.5]


def test_the_last_attempt_is_not_answered():
    tests = ["assert f(1) == 5"]
    for attempts, replies in ((1, False), (2, True)):
        env = Coding(seed=0, attempts=attempts)
        said = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "def f(x): return 0"},
        ]
        assert bool(asyncio.run(env.reply(Problem([], tests), said))) == replies


def test_the_program_in_what_was_said():
    assert (
        program_in("```py\na = 1\n```\nor\n```\nb = 2\n```") == "b = 2\n"
        and program_in("c = 3") == "c = 3"
        and program_in("```python\nd = 4") == "d = 4"
    )


def test_levels_of_the_shipped_envs_fit_their_turns():
    env: Any = make_env("calculator", 0, {"syntax": "brackets"}, "envs.x")
    said = [PolicyTurn("[3*4]", np.zeros(6, np.uint16)), PolicyTurn("12", np.zeros(3, np.uint16))]
    earned = env.rewards(env.problem(0), Completion("12", True, said))
    assert isinstance(earned, RewardBreakdown) and len(earned.turns) == 2
