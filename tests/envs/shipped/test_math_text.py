"""Which mathematics a text states as its answer."""

from __future__ import annotations

import pytest

from streamrl.envs.shipped.math_text import said_words, stated_math, unwrapped


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So it is $\boxed{3\sqrt{13}}$.", r"3\sqrt{13}"),
        (r"It is $5$, thus \boxed{7}. The answer is 8.", "7"),
        (r"The answer is \boxed{7", None),
        (r"The answer is 3\sqrt{13}.", r"3\sqrt{13}"),
        ("The answer is 42.", "42"),
        ("The answer is 4.25.", "4.25"),
        (r"The answer is 11,\! 111.", r"11,\! 111"),
        ("The answer is 42 apples because 6*7=42.", "42"),
        ("**Answer:** 42", "42"),
        ("**Final Answer**\n\n42", "42"),
        ("The final answer to this question is: **1/2**", "1/2"),
        ("6*7 = 42\n#### 42", "42"),
        ("The answer is:\n\\[\n\\frac{1}{2}\n\\]", r"\frac{1}{2}"),
        ("The answer is $41$ or $42$.", "41, 42"),
        ("The answer is $6!$.", "6!"),
        ("The answer is 6!", "6"),
        ("The answer is either 41 or 42.", "41 or 42"),
        ("The answer is 41 apples or 42 apples.", None),
        (r"so it is $\frac{2}{4}$", r"\frac{2}{4}"),
        ("x = 42", "x = 42"),
        ("A: 18", "18"),
        ("$18/day", "18"),
        ("So she earns\n\n$$\\$18$$\n\na day.", "\\$18"),
        ("9 eggs for $2 = **$18**", "2 = $18"),
        ("9 eggs × $2 = **$18**", "18"),
        ("a total of 2 million", "2 million"),
        ("I think 18 is wrong.", None),
        ("The answer is more than 18.", None),
        ("The answer is not 42.", None),
        ("It is <answer>42</answer>.", "42"),
        ("<answer>42", None),
        ("(x+1)^2", "(x+1)^2"),
        ("She has 42 apples.", "42"),
        ("She pays $5 for one and $7 for two, so $12.", "12"),
        (r"So the distance is 3\sqrt{13}.", r"3\sqrt{13}"),
        (r"so \( it is \(7\)", "7"),
        (r"so \[ it is \[7\]", "7"),
        ("It costs 5 and ", "5"),
        ("Evelyn", "Evelyn"),
        ("答案:12", "12"),
        ("所以答案是 12 个苹果.", "12"),
        ("她一共有12个苹果.", "12"),
        ("", None),
    ],
)
def test_what_a_text_states(text: str, answer: str | None):
    stated = stated_math(text)
    assert (stated and stated.removeprefix("$")) == answer


@pytest.mark.parametrize("piece", [" ", "\t", r"\(", r"\[", r"\( ", "$", "answer ", "and "])
def test_a_text_of_half_a_megabyte_is_read(piece: str):
    """A search that is not linear would take minutes."""
    stated = stated_math("1" + piece * (500_000 // len(piece)) + "x1")
    assert stated is None or "1" in stated


@pytest.mark.parametrize(
    ("box", "answer"),
    [
        (r"\text{The answer is }12", "12"),
        ("The answer is $12$", "12"),
        (r"\text{She has } 12 \text{ apples}", "12"),
        (r"\text{Total: } \frac{1}{2}", r"\frac{1}{2}"),
        (r"12 \text{ apples}", None),
        (r"\text{The answer is not }12", None),
        (r"\text{between } 10 \text{ and } 12", None),
        (r"\text{more than } 12", None),
        (r"\text{12 apples, and 13}", None),
        ("12", None),
    ],
)
def test_the_one_number_among_the_words_of_a_box(box: str, answer: str | None):
    assert unwrapped(box) == answer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The function is even.", "even"),
        ("There is no solution.", "no solution"),
        ("Yes, it is.", "Yes"),
        ("The answer is Evelyn.", "Evelyn"),
    ],
)
def test_an_answer_in_words_is_found_in_its_sentence(text: str, said: str):
    assert said in said_words(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("It is not even.", "even"),
        ("It is neither odd nor even.", "even"),
        ("No, but yes.", "No"),
        ("Is it even?", "even"),
    ],
)
def test_what_a_sentence_denies_or_asks_is_no_answer(text: str, word: str):
    assert word not in said_words(text)
