"""An env in one file: `47=` is to be answered `74`. A run file names it as `kind:
FILE.py:ReverseDigits`.
"""

from __future__ import annotations

import random

from streamrl.envs.api import Completion, Problem, SingleTurnEnv


class ReverseDigits(SingleTurnEnv):
    """The reward is the share of positions that are right. The end of the answer is one of them."""

    def __init__(self, seed: int, digits: int = 2) -> None:
        self.seed = seed
        self.digits = digits

    def problem(self, number: int) -> Problem:
        # The same seed and number give the same problem in every process.
        draw = random.Random(f"{self.seed} {number}")
        shown = "".join(draw.choices("0123456789", k=self.digits))
        return Problem([{"role": "user", "content": f"{shown}="}], answer=shown[::-1])

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        expected = problem.answer
        positions = len(expected) + 1
        right = sum(a == b for a, b in zip(completion.text, expected, strict=False))
        stopped = completion.finished and len(completion.text) == len(expected)
        return {"digits": right / positions, "stopped": stopped / positions}
