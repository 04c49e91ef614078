"""Add digits: `3+8=` is to be answered with the last digit of the sum, `1`, and nothing more."""

from __future__ import annotations

import random

from streamrl.envs.api import Answer, Problem
from streamrl.envs.shipped.copy_digits import positions_right


class AddDigits:
    """Reward: the share of the two positions, digit and end, that are right."""

    def __init__(self, seed: int, numbers: int = 2) -> None:
        if numbers < 1:
            raise ValueError(f"numbers is {numbers}; at least 1 is needed")
        self.seed, self.numbers = seed, numbers

    def problem(self, index: int) -> Problem:
        digits = random.Random(f"add {self.seed} {index}").choices(range(10), k=self.numbers)
        return Problem(
            [{"role": "user", "content": "+".join(map(str, digits)) + "="}], str(sum(digits) % 10)
        )

    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        return {"positions": positions_right(problem.answer, answer)}
