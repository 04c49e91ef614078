"""Calculator: `7*8=` is to be answered with what a tool says it is. A conversation of two turns:
the call, and the answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from streamrl.envs.api import Answer, Earned, Message, Problem
from streamrl.envs.shipped import arithmetic
from streamrl.envs.shipped.copy_digits import positions_right
from streamrl.envs.shipped.tools import Call, Syntax, calls, described, result

TOOL = described(
    "calculator",
    "What an expression of whole numbers comes to",
    {"expression": "with + - * and brackets, as 3*(4+5)"},
)


class Calculator:
    """Rewards: `answer`, that the last turn is the result, after a call; `call`, at each turn that
    called, that the tool had a result.

    In brackets, for models of a few characters, both are the share of the positions that are right,
    and a turn that calls nothing is judged as the call it should have been.
    """

    def __init__(
        self, seed: int, digits: int = 1, operators: str = "+*", syntax: Syntax = "json"
    ) -> None:
        if digits < 1 or not operators or set(operators) - set("+-*"):
            raise ValueError(
                f"digits is {digits}, operators {operators!r}; at least 1, and some of + - *"
            )
        if syntax not in ("json", "brackets"):
            raise ValueError(f"syntax is {syntax!r}; json or brackets")
        self.seed, self.digits, self.operators = seed, digits, operators
        self.syntax: Syntax = syntax

    def problem(self, index: int) -> Problem:
        draw = random.Random(f"calculate {self.seed} {index}")
        first, second = ("".join(draw.choices("123456789", k=self.digits)) for _ in range(2))
        expression = f"{first}{draw.choice(self.operators)}{second}"
        tools = [TOOL] if self.syntax == "json" else []
        return Problem(
            [{"role": "user", "content": f"{expression}="}],
            str(arithmetic.value(expression)),
            {"expression": expression},
            tools,
        )

    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message]:
        return [
            result(self._result(call), i)
            for i, call in enumerate(self._calls(messages[-1]["content"]))
        ]

    def rewards(self, problem: Problem, answer: Answer) -> Earned:
        asked = [bool(self._calls(said.text)) for said in answer.said]
        answered = answer._replace(
            text="" if asked[-1] else answer.text, finished=answer.finished and not asked[-1]
        )
        if self.syntax == "brackets":
            call = f"[{problem.metadata['expression']}]"
            ended = [True] * (len(asked) - 1) + [answer.truncation != "length"]
            calls = [
                positions_right(call, Answer(said.text, end))
                for said, end in zip(answer.said, ended, strict=True)
            ]
            final = positions_right(problem.answer, answered) if any(asked) else 0.0
            return Earned({"answer": final}, [{"call": calls[0]}] + [{} for _ in calls[1:]])
        good = [
            [not self._result(call).startswith("error") for call in self._calls(said.text)]
            for said in answer.said
        ]
        correct = any(asked) and answered.finished and answered.text.strip() == problem.answer
        return Earned(
            {"answer": float(correct)},
            [{"call": sum(turn) / len(turn)} if turn else {} for turn in good],
        )

    def _calls(self, text: str) -> list[Call]:
        return calls(text, self.syntax, "calculator", "expression")

    def _result(self, call: Call) -> str:
        """What the tool says; of a call that cannot be made, why."""
        short = self.syntax == "brackets"
        try:
            if (
                call.error
                or call.name != "calculator"
                or not isinstance(call.arguments.get("expression"), str)
            ):
                raise ValueError(
                    call.error
                    or f"there is no tool {call.name!r} that takes {', '.join(call.arguments) or 'nothing'}"
                )
            return str(arithmetic.value(call.arguments["expression"]))
        except ValueError as error:
            return "?" if short else f"error: {error}"
