"""Questions with choices: what is posed, and which letter an answer chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.envs.api import Completion
from streamrl.envs.catalog import make_env
from streamrl.envs.shipped.multiple_choice import chosen_letter
from streamrl.system.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("The answer is C.", "C"),
        ("(A) no: D)", "D"),
        ("banana", ""),
        ("I'd say B", "B"),
        ("The answer is C because I counted.", "C"),
        ("A small error gives C.", "C"),
        ("A, B or C", ""),
        ("not B", ""),
        ("A is incorrect, B is correct, C is incorrect.", "B"),
        ("B is wrong, so C", "C"),
        ("", ""),
        ("b", "B"),
        ("(b)", "B"),
        (" option b.", "B"),
        ("The answer is (b), since a dog is an animal.", "B"),
        ("The answer is a dog.", ""),
        ("<answer>b</answer>", "B"),
        ("<answer>B", ""),
        ("Ｂ", "B"),
        ("答案：（B）。", "B"),
        ("It's B, not A.", "B"),
        ("It is B rather than A.", "B"),
        ("Option (B) is correct since A is 3.", "B"),
        ("The answer is 'B'.", "B"),
        ("The answer is ‘B’.", "B"),
        ("B's sum is A's, so C", "C"),
        ("Answer: A\n\nB is wrong.", "A"),
        ("B? No. C.", "C"),
        ("The answer is C (A and B).", "C"),
        ("C) A and B are true", "C"),
        ("(C) or (B)", ""),
        ("A) B) C)", ""),
    ],
)
def test_the_letter_that_was_chosen(text: str, letter: str):
    assert chosen_letter(text) == letter


def test_only_letters_of_the_question_are_chosen():
    assert chosen_letter("The answer is I.", "ABCD") == ""
    assert chosen_letter("The answer is I.", "ABCDEFGHI") == "I"
    assert chosen_letter("E is too large, so C", "ABCD") == "C"


def test_all_choices_in_their_order_choose_none_and_what_follows_counts():
    assert chosen_letter("A) 3 B) 4 C) 5 D) 6", "ABCD") == ""
    assert chosen_letter("A) 3\nB) 4\nC) 5\nD) 6\nSo B.", "ABCD") == "B"
    assert chosen_letter("None of A, B, or C is right, so D.", "ABCD") == "D"


@pytest.mark.parametrize("piece", ["A B ", "A ", "not A ", "The answer is ", "A\n", "(A"])
def test_a_text_of_a_megabyte_is_read(piece: str):
    """A search that is not linear would take hours."""
    assert chosen_letter(piece * (1_000_000 // len(piece)), "ABCD") in ("", "A", "B")


@pytest.mark.parametrize("piece", [" ", "\t", " *", ". "])
def test_letters_with_half_a_megabyte_of_marks_between_them_are_no_list(piece: str):
    """A search that is not linear would take hours."""
    gap = piece * (500_000 // len(piece))
    assert chosen_letter(f"A{gap}!B", "ABCD") == "A"
    assert chosen_letter(f"The answer is A{gap}!B", "ABCD") == "A"


def test_a_right_answer_may_be_a_letter_in_the_file(tmp_path: Path):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "q", "choices": [1, 2.0, "3"], "answer": "C"}))
    problem = make_env("multiple-choice", 0, {"file": str(file)}, "envs.x").problem(0)
    shown = problem.messages[0]["content"].splitlines()
    assert f"{problem.answer}) 3" in shown and {line[3:] for line in shown[1:]} == {*"123"}


def test_choices_are_shuffled_and_the_right_one_keeps_its_letter(tmp_path: Path):
    file = tmp_path / "questions.jsonl"
    file.write_text(
        json.dumps(
            {"question": "Capital of France?", "choices": ["Rome", "Paris", "Oslo"], "answer": 1}
        )
        + "\n\n"
    )
    env = make_env("multiple-choice", 0, {"file": str(file)}, "envs.x")
    for index in range(10):
        problem = env.problem(index)
        assert f"{problem.answer}) Paris" in problem.messages[0]["content"].splitlines()
        assert env.rewards(problem, Completion(problem.answer, True)) == {"correct": 1.0}
    assert len({env.problem(i).answer for i in range(20)}) == 3
    sums = make_env("multiple-choice", 0, {}, "envs.x").problem(3)
    question, *choices = sums.messages[0]["content"].splitlines()
    one, other = (int(n) for n in question.removesuffix("=?").split("+"))
    assert f"{sums.answer}) {one + other}" in choices and len({c[3:] for c in choices}) == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{}", ":1: 'choices' is None, not a list of 2 to 10 choices"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', ":1: 2 choices and answer 2"),
        ("", "has no questions"),
        ('{"question": "q", "choices": ["a", null], "answer": 0}', ":1: 'choices' is None, not an"),
        ('{"question": "q", "choices": ["a", ["b"]], "answer": 0}', ":1: 'choices' is "),
        ('{"question": "q", "choices": ["a", "b"], "answer": true}', ":1: 2 choices and answer Tr"),
        ('{"question": ["q"], "choices": ["a", "b"], "answer": 0}', ":1: 'question' is "),
    ],
)
def test_a_file_that_is_none_is_named(line: str, says: str, tmp_path: Path):
    file = tmp_path / "file.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=f"^envs.x.params: multiple-choice refuses them.*{says}"):
        make_env("multiple-choice", 0, {"file": str(file)}, "envs.x")
