"""Multiple choice: a question with lettered choices is to be answered with a letter. Questions come
from a file, or are sums that are made here.

A line of the file is JSON: {"question": "...", "choices": ["...", ...], "answer": 2}. The answer
counts from 0.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.shipped.samples import parsed

LETTERS = "ABCDEFGHIJ"
SINGLE_LETTER = re.compile(r"(?<![A-Za-z])([A-J])(?![A-Za-z'])")


class Question(NamedTuple):
    question: str
    choices: list[str]
    answer: int  # the index of the right choice


class MultipleChoice(SingleTurnEnv):
    """The reward is `correct`: whether the last letter that stands alone is the right one. The
    order of the choices follows from seed and number.
    """

    def __init__(self, seed: int, file: str = "", choices: int = 4) -> None:
        if not 2 <= choices <= len(LETTERS):
            raise ValueError(f"choices is {choices}; 2 to {len(LETTERS)}")
        self.seed = seed
        self.choices = choices
        self._questions = read(Path(file)) if file else []
        self._order = EpochOrder(seed, len(self._questions)) if file else None

    def dataset_index(self, number: int) -> DatasetIndex | None:
        return self._order(number) if self._order else None

    def problem(self, number: int) -> Problem:
        draw = random.Random(f"choice {self.seed} {number}")
        posed = self.dataset_index(number)
        question = self._questions[posed.problem] if posed else self._sum(draw)
        order = draw.sample(range(len(question.choices)), len(question.choices))
        lines = [question.question]
        for letter, i in zip(LETTERS, order, strict=False):
            lines.append(f"{letter}) {question.choices[i]}")
        right = LETTERS[order.index(question.answer)]
        return Problem([{"role": "user", "content": "\n".join(lines)}], right)

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {"correct": float(chosen_letter(completion.text) == problem.answer)}

    def _sum(self, draw: random.Random) -> Question:
        one = draw.randint(0, 9)
        other = draw.randint(0, 9)
        right = one + other
        wrong = draw.sample([n for n in range(19) if n != right], self.choices - 1)
        return Question(f"{one}+{other}=?", [str(n) for n in (right, *wrong)], 0)


def chosen_letter(text: str) -> str:
    """The last letter that stands alone; empty if there is none."""
    letters = SINGLE_LETTER.findall(text)
    return letters[-1] if letters else ""


def read(path: Path) -> list[Question]:
    """The questions of a file. Raises ValueError, which names the line that cannot be used."""
    questions: list[Question] = []
    for line, question in parsed(path, "a question with choices and an answer", _question):
        count = len(question.choices)
        if not (2 <= count <= len(LETTERS) and 0 <= question.answer < count):
            raise ValueError(
                f"{path}:{line}: {count} choices and answer {question.answer}; "
                f"2 to {len(LETTERS)}, counted from 0"
            )
        questions.append(question)
    if not questions:
        raise ValueError(f"file {path} has no questions")
    return questions


def _question(data: Any) -> Question:
    choices = [str(choice) for choice in data["choices"]]
    return Question(str(data["question"]), choices, int(data["answer"]))
