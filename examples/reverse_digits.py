"""An env in one file: `47=` is to be answered `74`. Named in a run file as `kind:
examples/reverse_digits.py:ReverseDigits`.
"""

from __future__ import annotations

import random

from streamrl.envs.api import Answer, Problem


class ReverseDigits:
    """Reward: the share of the positions that are right, the end of the answer being one of them."""

    def __init__(self, seed: int, digits: int = 2) -> None:
        self.seed, self.digits = seed, digits

    def problem(self, index: int) -> Problem:
        # The same seed and index must give the same problem in every process: no global randomness
        # here.
        number = "".join(random.Random(f"{self.seed} {index}").choices("0123456789", k=self.digits))
        return Problem([{"role": "user", "content": f"{number}="}], answer=number[::-1])

    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        expected = problem.answer
        right = sum(a == b for a, b in zip(answer.text, expected, strict=False))
        stopped = answer.finished and len(answer.text) == len(expected)
        return {"digits": right / (len(expected) + 1), "stopped": stopped / (len(expected) + 1)}
