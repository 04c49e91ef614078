"""Copy digits: `47=` is to be answered `47`, and nothing more."""

from __future__ import annotations

import random
import re

from streamrl.envs.api import Answer, Problem

END = "<end>"


class CopyDigits:
    """Reward: the share of the positions that are right, the end of the answer being one of them.
    Exact match alone would never start to learn.
    """

    def __init__(self, seed: int, digits: int = 2) -> None:
        if digits < 1:
            raise ValueError(f"digits is {digits}; at least 1 is needed")
        self.seed, self.digits = seed, digits

    def problem(self, index: int) -> Problem:
        number = "".join(
            random.Random(f"copy {self.seed} {index}").choices("0123456789", k=self.digits)
        )
        return Problem([{"role": "user", "content": f"{number}="}], number)

    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        return {"positions": positions_right(problem.answer, answer)}


def positions_right(expected: str, answer: Answer) -> float:
    """The share of `expected`'s characters, and of the end behind them, that stand in their place.
    A special token is one position.
    """
    said = re.findall(r"<\w+>|.", answer.text, re.DOTALL) + [END] * answer.finished
    wanted = [*expected, END]
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)
