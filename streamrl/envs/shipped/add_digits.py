"""Add digits: `3+8=` is to be answered with the last digit of the sum, `1`, and nothing more."""

from __future__ import annotations

import random

from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.shipped.copy_digits import positions_right


class AddDigits(SingleTurnEnv):
    """The reward is the share of the two positions, the digit and the end, that are right."""

    def __init__(self, seed: int, numbers: int = 2) -> None:
        if numbers < 1:
            raise ValueError(f"numbers is {numbers}; at least 1 is needed")
        self.seed = seed
        self.numbers = numbers

    def problem(self, number: int) -> Problem:
        draw = random.Random(f"add {self.seed} {number}")
        digits = draw.choices(range(10), k=self.numbers)
        question = "+".join(map(str, digits)) + "="
        return Problem([{"role": "user", "content": question}], str(sum(digits) % 10))

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {"positions": positions_right(problem.answer, completion)}
