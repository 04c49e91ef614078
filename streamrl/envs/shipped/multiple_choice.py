"""Multiple choice: a question and lettered choices; the answer is a letter. Questions come from a
file, or are sums made here.

A line of the file is JSON: {"question": "...", "choices": ["...", ...], "answer": 2}, the answer
counted from 0.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.envs.api import Answer, Problem
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.shipped.samples import parsed

LETTERS = "ABCDEFGHIJ"
LETTER = re.compile(r"(?<![A-Za-z])([A-J])(?![A-Za-z'])")


class Question(NamedTuple):
    question: str
    choices: list[str]
    answer: int  # index of the right choice


class MultipleChoice:
    """Reward: `correct`, that the last letter standing alone is the right one. The choices come in
    an order that follows from seed and index.
    """

    def __init__(self, seed: int, file: str = "", choices: int = 4) -> None:
        if not 2 <= choices <= len(LETTERS):
            raise ValueError(f"choices is {choices}; 2 to {len(LETTERS)}")
        self.seed, self.choices = seed, choices
        self._questions = read(Path(file)) if file else []
        self._epochs = EpochOrder(seed, len(self._questions)) if file else None

    def dataset_index(self, index: int) -> DatasetIndex | None:
        return self._epochs(index) if self._epochs else None

    def problem(self, index: int) -> Problem:
        draw = random.Random(f"choice {self.seed} {index}")
        question = (
            self._questions[place.problem]
            if (place := self.dataset_index(index))
            else self._sum(draw)
        )
        order = draw.sample(range(len(question.choices)), len(question.choices))
        lines = [
            question.question,
            *(
                f"{letter}) {question.choices[i]}"
                for letter, i in zip(LETTERS, order, strict=False)
            ),
        ]
        return Problem(
            [{"role": "user", "content": "\n".join(lines)}], LETTERS[order.index(question.answer)]
        )

    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        return {"correct": float(chosen(answer.text) == problem.answer)}

    def _sum(self, draw: random.Random) -> Question:
        one, other = draw.randint(0, 9), draw.randint(0, 9)
        wrong = draw.sample([n for n in range(19) if n != one + other], self.choices - 1)
        return Question(f"{one}+{other}=?", [str(n) for n in (one + other, *wrong)], 0)


def chosen(text: str) -> str:
    """The last letter that stands alone; empty when there is none."""
    found = LETTER.findall(text)
    return found[-1] if found else ""


def read(path: Path) -> list[Question]:
    """The questions of a file. Raises ValueError that names the line."""
    found: list[Question] = []
    for line, question in parsed(path, "a question with choices and an answer", _question):
        if not (
            2 <= len(question.choices) <= len(LETTERS)
            and 0 <= question.answer < len(question.choices)
        ):
            raise ValueError(
                f"{path}:{line}: {len(question.choices)} choices and answer {question.answer}; 2 to {len(LETTERS)}, counted from 0"
            )
        found.append(question)
    if not found:
        raise ValueError(f"file {path} has no questions")
    return found


def _question(data: Any) -> Question:
    return Question(
        str(data["question"]), [str(choice) for choice in data["choices"]], int(data["answer"])
    )
