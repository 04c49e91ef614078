"""Where the data sets that many people train on have prompt and right answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from streamrl.envs.shipped.answers import in_box

BOXED = "Think step by step, and put the final answer into \\boxed{}."


class Template(NamedTuple):
    """The form of a data set."""

    columns: Mapping[str, str]  # as `samples.Columns` has them
    right_answer: Callable[[str], str]  # of the text in the answer's column; raises ValueError
    instruction: str


def after_hashes(text: str) -> str:
    """What follows the last `####` of a solution. Raises ValueError if there is none."""
    _, hashes, answer = text.rpartition("####")
    if not hashes or not answer.strip():
        raise ValueError("the solution has no answer after ####")
    return answer.strip()


def of_last_box(text: str) -> str:
    """What the last box of a solution holds. Raises ValueError if there is none."""
    answer = in_box(text)
    if not answer:
        raise ValueError("the solution has no answer in a box")
    return answer


TEMPLATES = {
    "": Template({}, str, ""),
    "gsm8k": Template({"prompt": "question", "answer": "answer"}, after_hashes, BOXED),
    "boxed": Template({"prompt": "problem", "answer": "solution"}, of_last_box, BOXED),
}
"""`gsm8k`: questions with solutions that end in `#### 72`. `boxed`: problems with solutions that
end in a box, as those of MATH. Both ask for the answer in a box.
"""
