"""Sums and differences in words, for a pretrained model: `What is 14 minus 5?`. A run file names it
as `kind: examples/sums_in_words.py:SumsInWords` (deploy/runs/learn.yaml).
"""

from __future__ import annotations

import random
import re

from streamrl.envs.api import Completion, Problem, SingleTurnEnv

NUMBER = re.compile(r"\d+")


class SumsInWords(SingleTurnEnv):
    """The reward `right` is 0.8 if the last number of the answer is right, and `brief` is 0.2 if
    the answer is that number and nothing else.
    """

    def __init__(self, seed: int, largest: int = 20) -> None:
        self.seed = seed
        self.largest = largest

    def problem(self, number: int) -> Problem:
        draw = random.Random(f"{self.seed} {number}")
        second = draw.randint(2, 9)
        first = draw.randint(second + 1, self.largest)
        word, result = draw.choice((("plus", first + second), ("minus", first - second)))
        messages = [
            {"role": "system", "content": "Answer with the number only."},
            {"role": "user", "content": f"What is {first} {word} {second}?"},
        ]
        return Problem(messages, answer=str(result))

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        numbers = NUMBER.findall(completion.text)
        right = bool(numbers) and numbers[-1].lstrip("0") == problem.answer
        brief = right and completion.finished and completion.text.strip() == problem.answer
        return {"right": 0.8 * right, "brief": 0.2 * brief}
