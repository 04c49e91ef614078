"""Numbers in English words, as models write them: "seventy-two clips"."""

from __future__ import annotations

import re

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    " fifteen sixteen seventeen eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
VALUES = {
    **{word: value for value, word in enumerate(SMALL.split())},
    **{word: 10 * value for value, word in enumerate(TENS.split(), 2)},
}
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
WORD = "|".join([*VALUES, *SCALES])
NUMBER = re.compile(rf"(?i)(?<![\w-])(?:{WORD})(?:(?:[ -]|, | and |-and-)(?:{WORD}))*(?![\w-])")


def in_digits(text: str) -> str:
    """A text whose only number is in words, with that number in digits. Any other text stays as it
    is, and so does one with "one" or a scale, unless that is all of it.
    """
    if re.search(r"\d", text):
        return text
    found = [*NUMBER.finditer(text)]
    if len(found) != 1:
        return text
    number = found[0]
    words = number[0].lower()
    is_pronoun = words == "one" or words in SCALES
    if is_pronoun and text.strip(" \n.*$").lower() != words:
        return text
    return f"{text[: number.start()]}{value_of(words)}{text[number.end() :]}"


def value_of(words: str) -> int:
    """The number that words in lower case are: 1205 for "one thousand two hundred and five"."""
    value = 0
    part = 0
    for word in re.findall(r"[a-z]+", words):
        if word == "hundred":
            part = max(part, 1) * 100
        elif word in SCALES:
            value += max(part, 1) * SCALES[word]
            part = 0
        else:
            part += VALUES.get(word, 0)
    return value + part
