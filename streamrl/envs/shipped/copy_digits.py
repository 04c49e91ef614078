"""Copy digits: `47=` is to be answered `47`, and nothing more."""

from __future__ import annotations

import random
import re

from streamrl.envs.api import Completion, Problem, SingleTurnEnv

END = "<end>"


class CopyDigits(SingleTurnEnv):
    """The reward is the share of the positions that are right; the end of the answer is one of
    them. A model that knows nothing would never start to learn from exact matches alone.
    """

    def __init__(self, seed: int, digits: int = 2) -> None:
        if digits < 1:
            raise ValueError(f"digits is {digits}; at least 1 is needed")
        self.seed = seed
        self.digits = digits

    def problem(self, number: int) -> Problem:
        draw = random.Random(f"copy {self.seed} {number}")
        shown = "".join(draw.choices("0123456789", k=self.digits))
        return Problem([{"role": "user", "content": f"{shown}="}], shown)

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {"positions": positions_right(problem.answer, completion)}


def positions_right(expected: str, completion: Completion) -> float:
    """The share of the characters of `expected`, and of the end after them, that are in the right
    position. A special token takes one position.
    """
    symbols = re.findall(r"<\w+>|.", completion.text, re.DOTALL)
    if completion.finished:
        symbols.append(END)
    wanted = [*expected, END]
    return sum(a == b for a, b in zip(symbols, wanted, strict=False)) / len(wanted)
