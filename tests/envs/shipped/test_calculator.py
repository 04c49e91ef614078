"""The calculator: whole conversations with a policy that plays by a script."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamrl.envs.api import Completion, PolicyTurn, RewardBreakdown
from streamrl.envs.catalog import make_env
from tests.envs.talking import play, texts


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


def test_levels_of_the_shipped_envs_fit_their_turns():
    env: Any = make_env("calculator", 0, {"syntax": "brackets"}, "envs.x")
    said = [PolicyTurn("[3*4]", np.zeros(6, np.uint16)), PolicyTurn("12", np.zeros(3, np.uint16))]
    earned = env.rewards(env.problem(0), Completion("12", True, said))
    assert isinstance(earned, RewardBreakdown) and len(earned.turns) == 2
