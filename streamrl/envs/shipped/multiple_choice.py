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
from streamrl.envs.shipped.answers import (
    AnswerPlace,
    answer_in,
    check_place,
    closed_boxes,
    half_width,
    in_box,
    in_tag,
)
from streamrl.envs.shipped.cells import answer_in_cell, shown, text_in, value_of
from streamrl.envs.shipped.row_files import read_rows

LETTERS = "ABCDEFGHIJ"
# Marks that are put around a letter.
MARKS = r"[\s*_`\"'“”()\[\]{}$.,:;!]*"
STATED = re.compile(
    r"(?i)\b(?:answer|choice|option)s?\b[*_]*(?:\s+(?:to|of|for)\b[^\n.:]{0,60}?)?\s*"
    r"(?:\b(?:is|are|would be|must be|should be|has to be)\b|[:=])"
    r"(?:\s*(?:clearly|definitely|therefore|thus|indeed|simply|actually|option|choice|letter|:))*"
    r"|\b(?:it|that)(?:'s| is)\b"
    r"|\bI(?:'d| would| will|'ll)?\s+(?:choose|pick|select|say|go with|chose|picked|selected)\b"
    r"(?:\s+(?:option|choice|letter))?"
    r"|\b(?:so|thus|hence|therefore)\b,?(?:\s+(?:it|that)(?:'s| is| must be| has to be))?"
)
JUDGED = re.compile(
    r"(?i)[\s)*_\]]*\b(?:is|must be|has to be)\s+(?:the\s+)?(?:right|correct|true)\b"
)
REJECTED = re.compile(
    r"(?i)[\s)*_.:,?-]*(?:(?:is|was|are)\s+)?"
    r"(?:(?:no|not)\b(?![\s(*_]*(?-i:[A-J])\b)|(?:wrong|incorrect|false|isn't|cannot|can't)\b)"
)
# Where a small letter is a choice: it is all of the text, or follows one of these words and ends a
# clause.
SMALL = re.compile(
    r"(?i)(?:\b(?:options?|choice|answer)\b[*_]*(?:\s+is\b)?[\s:=(*_]*|^[\s(*_\[{$`\"']*)"
    r"(?P<letter>[a-j])(?=[\s)*_\]}$`\"']*(?:[.,:;!\n]|$))"
)
NOT = re.compile(r"(?i)(?:\bnot|n't(?: be)?|\bnor)\s+(?:option|choice|letter)?[\s(*\"']*$")
LONE = r"(?<![A-Za-z0-9])(?<![A-Za-z]['’])"  # what is not before a letter that is a choice
BEFORE = " \t*_(\"'>-`[{"  # marks that come before a letter at the beginning of a line
MOST_MARKS = 12
# Between two letters, these make a list of them. A sentence about the second one ends it.
LIST = re.compile(
    r"(?i)[ \t)*_$.]*(?:,?[ \t]*\b(?:and|or)\b|[,/&;]|[ \t])(?:[ \t]*(?:and|or)\b)?[ \t(*_$]*"
)
LONGEST_LIST = 60  # characters between two letters: LIST takes their square in time
SENTENCE = re.compile(r"[)*_]*\s+(?:is|was|has|would|cannot|can|does)\b")


class Question(NamedTuple):
    question: str
    choices: list[str]
    answer: int  # the index of the right choice


class MultipleChoice(SingleTurnEnv):
    """The reward is `correct`: whether the answer chooses the right letter. The order of the
    choices follows from seed and number. `answer` is where the answer is read (`answers.py`).
    """

    def __init__(
        self,
        seed: int,
        file: str = "",
        choices: int = 4,
        answer: AnswerPlace = "after-think",
    ) -> None:
        if not 2 <= choices <= len(LETTERS):
            raise ValueError(f"choices is {choices}; 2 to {len(LETTERS)}")
        check_place(answer)
        self.seed = seed
        self.choices = choices
        self.answer: AnswerPlace = answer
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
        letters = LETTERS[: len(order)]
        return Problem(
            messages=[{"role": "user", "content": "\n".join(lines)}],
            answer=right,
            metadata={"letters": letters},
        )

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        answer = answer_in(completion, self.answer)
        letters = problem.metadata.get("letters", LETTERS)
        chosen = "" if answer is None else chosen_letter(answer, letters)
        return {"correct": float(chosen == problem.answer)}

    def _sum(self, draw: random.Random) -> Question:
        one = draw.randint(0, 9)
        other = draw.randint(0, 9)
        right = one + other
        wrong = draw.sample([n for n in range(19) if n != right], self.choices - 1)
        return Question(f"{one}+{other}=?", [str(n) for n in (right, *wrong)], 0)


class Letter(NamedTuple):
    """A letter of a choice, where a text names it."""

    letter: str
    start: int
    end: int


def chosen_letter(text: str, letters: str = LETTERS) -> str:
    """The letter, of those of the question, that a text chooses; empty if it chooses none.

    In this order: the letter in a box or a tag, the last one that is stated as the answer, one that
    is called right, one that the text begins with, and the last one that the text names. A list of
    letters chooses none, and "A" and "I" in a sentence are words.
    """
    text = half_width(text)
    if closed_boxes(text) is None:
        return ""
    held = in_box(text) or in_tag(text)
    if held is not None or "<answer>" in text:
        return _only_letter(held or "", letters)
    text = _capitalized(text)
    named = letters_in(text, letters)
    stated = _stated(text, named)
    if stated is not None:
        return stated
    named = [each for each in named if not _is_rejected(text, each)]
    called_right = [
        each.letter
        for index, each in enumerate(named)
        if JUDGED.match(text, each.end) and not (index and _joined(text, named[index - 1], each))
    ]
    if called_right:
        return called_right[-1] if len(set(called_right)) == 1 else ""
    return _first_or_last(text, named, letters)


def letters_in(text: str, letters: str) -> list[Letter]:
    """The letters of choices that a text names, in order."""
    found: list[Letter] = []
    for match in re.finditer(rf"{LONE}([{letters}])(?![A-Za-z0-9])(?!['’][A-Za-z])", text):
        if not _is_word(text, match):
            found.append(Letter(match[1], match.start(), match.end()))
    return found


def _capitalized(text: str) -> str:
    """A text whose small letters are capitals where they are a choice."""
    return SMALL.sub(
        lambda match: text[match.start() : match.end() - 1] + match["letter"].upper(), text
    )


def _is_word(text: str, match: re.Match[str]) -> bool:
    """Whether an "A" or an "I" is a word of a sentence: another word follows, and it is not one
    that follows a letter.
    """
    if match[1] not in "AI":
        return False
    after = re.match(r"[ \t]+([A-Za-z]+)", text[match.end() : match.end() + 24])
    if after is None:
        return False
    follows_letter = ("is", "because", "since", "as", "or", "and", "was", "must", "has", "seems")
    return match[1] == "I" or after[1].lower() not in follows_letter


def _is_rejected(text: str, named: Letter) -> bool:
    """Whether a text calls a choice wrong, or names it after a "not"."""
    before = text[max(0, named.start - 30) : named.start]
    return bool(REJECTED.match(text, named.end) or NOT.search(before))


def _only_letter(held: str, letters: str) -> str:
    """The one letter that a box or a tag names."""
    held = _capitalized(held)
    held = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*", "", held)
    named = {each.letter for each in letters_in(held, letters)}
    return named.pop() if len(named) == 1 else ""


def _stated(text: str, named: list[Letter]) -> str | None:
    """The letter of the last statement of an answer; empty if that lists several. None if the text
    states none.
    """
    by_start = {each.start: index for index, each in enumerate(named)}
    stated: str | None = None
    for match in STATED.finditer(text):
        marks = re.compile(MARKS).match(text, match.end())
        begin = marks.end() if marks else match.end()
        if begin in by_start:
            index = by_start[begin]
            stated = "" if _is_listed(text, named, index) else named[index].letter
    return stated


def _is_listed(text: str, named: list[Letter], index: int) -> bool:
    """Whether the letter is one of a list of different letters."""
    for first, second in ((index - 1, index), (index, index + 1)):
        if first < 0 or second >= len(named):
            continue
        is_told = SENTENCE.match(text, named[second].end)
        if not is_told and _joined(text, named[first], named[second]):
            return True
    return False


def _joined(text: str, first: Letter, second: Letter) -> bool:
    """Whether two different letters that follow one another are a list."""
    if first.letter == second.letter or second.start - first.end > LONGEST_LIST:
        return False
    is_label = text[first.end : first.end + 1] == ")" != text[second.end : second.end + 1]
    if is_label and text[max(0, first.start - 1) : first.start] != "(":
        return False  # "C) A and B are true"
    between = text[first.end : second.start]
    return between != " (" and LIST.fullmatch(between) is not None


def _first_or_last(text: str, named: list[Letter], letters: str) -> str:
    """The letter that a text begins with, if no other line begins with another; otherwise the last
    one that it names, unless that is one of a list. All choices in their order choose none.
    """
    if [each.letter for each in named[: len(letters)]] == [*letters]:
        named = named[len(letters) :]
    if not named:
        return ""
    at_begin = {each.letter for each in named if _begins_line(text, each.start)}
    first = named[0]
    if not text[: first.start].strip(f"\n{BEFORE}") and at_begin == {first.letter}:
        return "" if _is_listed(text, named, 0) else first.letter
    if len(at_begin) > 1 and len(at_begin) == len({each.letter for each in named}):
        return ""  # the choices, written again
    last = len(named) - 1
    return "" if _is_listed(text, named, last) else named[last].letter


def _begins_line(text: str, index: int) -> bool:
    """Whether a line has only a few marks before the index."""
    before = text[max(0, index - MOST_MARKS) : index]
    line = before.rpartition("\n")
    return bool(line[1] or index <= MOST_MARKS) and not line[2].strip(BEFORE)


def read(path: Path) -> list[Question]:
    """The questions of a file. Raises ValueError, which names the lines that cannot be used."""
    return read_rows(path, "questions", _question)


def _question(line: int, row: Any) -> Question:
    choices = value_of(row.get("choices"))
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(
            f"'choices' is {shown(choices)}, not a list of 2 to {len(LETTERS)} choices"
        )
    texts = [answer_in_cell(choice, "choices") for choice in choices]
    answer = value_of(row.get("answer"))
    if isinstance(answer, str) and answer in LETTERS[: len(texts)]:
        answer = LETTERS.index(answer)
    if type(answer) is not int or not 0 <= answer < len(texts):
        raise ValueError(
            f"{len(texts)} choices and answer {shown(answer)}; the answer is the number of a"
            " choice, from 0, or its letter"
        )
    return Question(text_in(row.get("question"), "question"), texts, answer)
