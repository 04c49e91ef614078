"""Where an answer is read: after thoughts, in a tag, in a box."""

from __future__ import annotations

import pytest

from streamrl.envs.api import Completion
from streamrl.envs.shipped.answers import (
    AnswerPlace,
    answer_in,
    check_place,
    half_width,
    read_answer,
)


@pytest.mark.parametrize(
    ("place", "text", "answer"),
    [
        ("whole", " <think>a</think> 8\n", "<think>a</think> 8"),
        ("whole", "<think>a", None),
        ("after-think", "<think>a</think> 8\n", "8"),
        ("tag", "It is <answer> 8 </answer>.", "8"),
        ("tag", "<answer>7</answer> no: <answer>8</answer>", "8"),
        ("tag", "<think><answer>8</answer></think> 7", None),
        ("tag", "8", None),
        ("tag", "<answer>7</answer> <answer>8", None),
        ("tag", "8</answer>", None),
        ("boxed", r"$\boxed{8}$", "8"),
        ("boxed", r"$\boxed 8$", "8"),
        ("boxed", r"It is \boxed  -1/2.", "-1/2"),
        ("boxed", r"\boxed 7, \boxed{8}, and \fbox 9 are all.", "7, 8, 9"),
        ("boxed", r"\boxed{7 + \boxed 8}", "8"),
        ("boxed", r"It goes into a \boxed answer: 8", None),
        # without braces TeX boxes less than was meant
        ("boxed", r"\boxed 12x", None),
        ("boxed", r"\boxed 1,234x", None),
        ("boxed", r"\boxed 2^{10}", None),
        ("boxed", r"\boxed 12\pi", None),
        ("boxed", r"\(\boxed 12\)", "12"),
        ("boxed", r"\boxed 1,234.", "1,234"),
        ("boxed", r"\framebox{8}", "8"),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{\boxed{8}}", "8"),
        ("boxed", r"\fbox{7} \boxed {8}", "7, 8"),
        ("boxed", r"Perhaps \boxed{7}. No, that is wrong: it has to be \boxed{8}", "8"),
        ("boxed", r"\boxed{7} or \boxed{8}", "7, 8"),
        ("boxed", r"\boxed{7}, or maybe it is \boxed{8}", "7, 8"),
        ("boxed", r"\boxed{8} $=$ \boxed{8}", "8"),
        ("boxed", "1. \\boxed{7}\n2. \\boxed{8}", "7, 8"),
        ("boxed", r"It could be \boxed{7}. It might also be \boxed{8}.", "7, 8"),
        ("boxed", r"Perhaps \boxed{7}. No: \boxed{8", None),
        ("boxed", r"<think>\boxed{8}</think> \boxed{7}", "7"),
        ("boxed", "8", None),
    ],
)
def test_an_answer_is_read_in_its_place(place: AnswerPlace, text: str, answer: str | None):
    assert read_answer(text, place) == answer


@pytest.mark.parametrize("place", ["whole", "after-think", "tag", "boxed"])
def test_an_answer_that_is_cut_off_is_none(place: AnswerPlace):
    text = r"<answer>\boxed{8}</answer>"
    assert answer_in(Completion(text, finished=True), place) is not None
    assert answer_in(Completion(text, finished=False, truncation="length"), place) is None


def test_an_unknown_place_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no place 'box' of an answer; did you mean 'boxed'\?"):
        check_place("box")


@pytest.mark.parametrize("piece", ["<think>", r"\boxed{", r"\boxed{7} or ", "<answer>", "{", " "])
def test_a_text_of_a_megabyte_is_read(piece: str):
    """A search that is not linear would take hours."""
    text = piece * (1_000_000 // len(piece))
    for place in ("whole", "after-think", "tag", "boxed"):
        read_answer(text, place)


def test_full_width_letters_digits_and_marks_are_those_of_ascii():
    assert half_width("答案：（Ｂ），１２．５％。\u3000次") == "答案:(B),12.5%.  次"
