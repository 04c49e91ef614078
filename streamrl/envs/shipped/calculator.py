"""Calculator: `7*8=` is to be answered with the result of a tool. The conversation has two turns,
the call and the answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from streamrl.config.choices import TOOL_SYNTAXES, ToolSyntax
from streamrl.envs.api import Completion, Message, MultiTurnEnv, Problem, RewardBreakdown
from streamrl.envs.sessions.call_formats import ToolCall
from streamrl.envs.sessions.tool_calls import function_tool, parse_calls, tool_message
from streamrl.envs.shipped import arithmetic
from streamrl.envs.shipped.answers import answer_in
from streamrl.envs.shipped.copy_digits import positions_right

TOOL = function_tool(
    "calculator",
    "What an expression of whole numbers comes to",
    {
        "type": "object",
        "properties": {
            "expression": {
                "type": "string",
                "description": "with + - * and brackets, as 3*(4+5)",
            }
        },
        "required": ["expression"],
    },
)


class Calculator(MultiTurnEnv):
    """The rewards are `answer`, for a last turn that is the result after a call was made, thoughts
    aside, and, at each turn that called, `call`: the share of its calls that had a result.

    In brackets, for models whose vocabulary is a few characters, both are the share of the
    positions that are right, and a turn that calls nothing is compared with the call that it should
    have been.
    """

    def __init__(
        self, seed: int, digits: int = 1, operators: str = "+*", syntax: ToolSyntax = "auto"
    ) -> None:
        if digits < 1 or not operators or set(operators) - set("+-*"):
            raise ValueError(
                f"digits is {digits}, operators {operators!r}; at least 1, and some of + - *"
            )
        if syntax not in TOOL_SYNTAXES:
            raise ValueError(f"syntax is {syntax!r}; one of {', '.join(TOOL_SYNTAXES)}")
        self.seed = seed
        self.digits = digits
        self.operators = operators
        self.syntax: ToolSyntax = syntax

    def problem(self, number: int) -> Problem:
        draw = random.Random(f"calculate {self.seed} {number}")
        first = "".join(draw.choices("123456789", k=self.digits))
        second = "".join(draw.choices("123456789", k=self.digits))
        expression = f"{first}{draw.choice(self.operators)}{second}"
        return Problem(
            messages=[{"role": "user", "content": f"{expression}="}],
            answer=str(arithmetic.value(expression)),
            metadata={"expression": expression},
            tools=[] if self.syntax == "brackets" else [TOOL],
        )

    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message]:
        calls = self._calls(messages[-1]["content"])
        return [tool_message(self._result(call), i) for i, call in enumerate(calls)]

    def rewards(self, problem: Problem, completion: Completion) -> RewardBreakdown:
        if self.syntax == "brackets":
            return self._positions(problem, completion)
        answer = 0.0
        turns: list[dict[str, float]] = []
        for turn in completion.turns:
            calls = self._calls(turn.text)
            good = sum(not self._result(call).startswith("error") for call in calls)
            turns.append({"call": good / len(calls)} if calls else {})
        if any(turns) and not turns[-1] and completion.finished:
            answer = float(answer_in(completion, "after-think") == problem.answer)
        return RewardBreakdown({"answer": answer}, turns)

    def _positions(self, problem: Problem, completion: Completion) -> RewardBreakdown:
        """The rewards of calls in brackets."""
        called = [bool(self._calls(turn.text)) for turn in completion.turns]
        answer = 0.0
        if any(called):
            final = completion
            if called[-1]:
                final = completion._replace(text="", finished=False)
            answer = positions_right(problem.answer, final)
        first = Completion(
            completion.turns[0].text,
            finished=len(called) > 1 or completion.truncation != "length",
        )
        call = positions_right(f"[{problem.metadata['expression']}]", first)
        later: list[dict[str, float]] = [{} for _ in called[1:]]
        return RewardBreakdown({"answer": answer}, [{"call": call}, *later])

    def _calls(self, text: str) -> list[ToolCall]:
        return parse_calls(text, self.syntax, [TOOL])

    def _result(self, call: ToolCall) -> str:
        """The tool's result, or why the call cannot be made."""
        try:
            return str(arithmetic.value(_expression(call)))
        except ValueError as error:
            return "?" if self.syntax == "brackets" else f"error: {error}"


def _expression(call: ToolCall) -> str:
    """The expression that is to be evaluated. Raises ValueError for what is no call of the
    calculator.
    """
    if call.error:
        raise ValueError(call.error)
    expression = call.arguments.get("expression")
    if call.name != "calculator" or not isinstance(expression, str):
        taken = ", ".join(call.arguments) or "nothing"
        raise ValueError(f"there is no tool {call.name!r} that takes {taken}")
    return expression
