from __future__ import annotations

import pytest

from streamrl.envs.shipped.number_words import in_digits


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("twelve", "12"),
        ("Seventy-two clips", "72 clips"),
        ("one hundred and five", "105"),
        ("two thousand, three hundred", "2300"),
        ("three million two hundred thousand and one", "3200001"),
        (r"\text{Zero}", r"\text{0}"),
        ("One.", "1."),
        ("a hundred", "a hundred"),
        ("No one knows", "No one knows"),
        ("two of the twelve", "two of the twelve"),
        ("seven is 7", "seven is 7"),
        ("often", "often"),
        ("the twenty-first", "the twenty-first"),
    ],
)
def test_the_only_number_of_a_text_is_written_in_digits(text: str, digits: str):
    assert in_digits(text) == digits
