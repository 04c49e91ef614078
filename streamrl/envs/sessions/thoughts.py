"""Splits an answer into its thoughts, which are between `<think>` and `</think>`, and the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TAG = re.compile(r"<(/?)think>")


def spans_outside_thoughts(text: str) -> Iterator[tuple[int, int]]:
    """The parts of an answer that are no thoughts, by their first character and the one after their
    last. A chat template may have opened the first thought, and the last may never be closed: a
    part is a thought if `<think>` is the tag before it or `</think>` the tag after it.
    """
    start = 0
    is_open = False
    for tag in _TAG.finditer(text):
        closes = bool(tag[1])
        if not is_open and not closes:
            yield start, tag.start()
        is_open = not closes
        start = tag.end()
    if not is_open:
        yield start, len(text)


def without_thoughts(text: str) -> str:
    """What an answer answers. A text without thoughts stays as it is."""
    if not _TAG.search(text):
        return text
    return "".join(text[start:end] for start, end in spans_outside_thoughts(text)).strip()


def thoughts_of(text: str) -> str:
    """The thoughts of an answer; empty if it has none."""
    thoughts = list[str]()
    place = 0
    for start, end in spans_outside_thoughts(text):
        thoughts.append(text[place:start])
        place = end
    thoughts.append(text[place:])
    return "\n\n".join(filter(None, (_TAG.sub("", part).strip() for part in thoughts)))
