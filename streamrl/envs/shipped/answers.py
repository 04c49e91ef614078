"""Finds the answer in what a policy wrote: after its thoughts, in a tag, or in a box.

An answer that is cut off, or that leaves a thought or a box open, is no answer and earns nothing.
All functions here take linear time, since the text comes from the policy.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from streamrl.envs.api import Completion
from streamrl.envs.sessions.thoughts import after_thoughts
from streamrl.system.text import nearest_or_all

AnswerPlace = Literal["whole", "after-think", "tag", "boxed"]
PLACES: tuple[str, ...] = get_args(AnswerPlace)

ANSWER_TAG = re.compile(r"<(/?)answer>")
BRACE = re.compile(
    r"\\(?:boxed|fbox|framebox)"
    r"(?:\s*\{|\s+(?P<bare>[-+]?\d+(?:[.,/:^]\d+)*)(?![\w^{]|[.,/:]\d|\\[a-zA-Z]))|\\.|[{}]",
    re.DOTALL,
)
# What may be between two boxes, or two formulas, that are one answer together.
JOINT = re.compile(
    r"(?i)(?:\s|[-$,;.:*/&()\[\]•]|\n[ \t]*\d{1,2}[.)]|\\[()\[\],;: ]|\\q?quad\b"
    r"|\\text\s*\{\s*(?:and|or)\s*\}"
    r"|\b(?:and|or|also|either|maybe|perhaps|possibly|if|not|it|is|alternatively|could|might|may|be"
    r"|another|other|option|possibility|second)\b)*"
)

# Letters, digits and marks as wide as a Chinese character, and the full stop.
WIDE: dict[int, str] = {
    **{0xFEE0 + code: chr(code) for code in range(ord("!"), ord("~") + 1)},
    ord("\u3000"): " ",
    ord("。"): ". ",
}


def half_width(text: str) -> str:
    """A text with full-width letters, digits and marks as ASCII has them."""
    return text.translate(WIDE)


def check_place(place: str) -> None:
    """Raises ValueError, which names the places, if `place` is none of them."""
    if place not in PLACES:
        raise ValueError(f"no place {place!r} of an answer; {nearest_or_all(place, PLACES)}")


def answer_in(completion: Completion, place: AnswerPlace) -> str | None:
    """The answer of a completion: its last text, read as `read_answer` does. None if it is cut
    off.
    """
    return read_answer(completion.text, place) if completion.finished else None


def read_answer(text: str, place: AnswerPlace) -> str | None:
    """The answer in a text, without blanks around it, or None if there is none.

    - `whole`: all of the text, thoughts included.
    - `after-think`: what follows the last thought.
    - `tag`: what the last <answer> after the thoughts holds.
    - `boxed`: what the last `\\boxed{}` after the thoughts holds, or the number after a `\\boxed`
      without braces. Boxes that are joined by commas, `and` or `or` are one answer: "1, 2".

    A thought that is left open is no answer in any place, and so is a tag or a box where these are
    read.
    """
    after = after_thoughts(text)
    if after is None:
        return None
    match place:
        case "whole":
            return text.strip()
        case "after-think":
            return after.strip()
        case "tag":
            return in_tag(after)
        case "boxed":
            return in_box(after)


def in_tag(text: str) -> str | None:
    """What the last <answer> holds. None if there is none, or if it is open."""
    begin = -1
    held: str | None = None
    for tag in ANSWER_TAG.finditer(text):
        if not tag[1]:
            begin = tag.end()
        elif begin >= 0:
            held = text[begin : tag.start()].strip()
            begin = -1
    return held if begin < 0 else None


def in_box(text: str) -> str | None:
    """What the last box holds, with those that are joined to it. None if there is no box, or if one
    is open. A box in a box is unpacked.
    """
    boxes = closed_boxes(text)
    if not boxes:
        return None
    last = boxes[-1]
    held = [text[last.held : last.held_end]]
    for box in reversed(boxes[:-1]):
        if not JOINT.fullmatch(text, box.end, last.start):
            break
        held.append(text[box.held : box.held_end])
        last = box
    return ", ".join(dict.fromkeys(one.strip() for one in reversed(held)))


class Box(NamedTuple):
    """Where a box is in a text."""

    start: int
    held: int  # where what it holds begins
    held_end: int
    end: int


def closed_boxes(text: str) -> list[Box] | None:
    """The innermost boxes of a text, in order. None if a box is open."""
    boxes: list[Box] = []
    # The braces that are open: where a box and what it holds begin, or None for another brace.
    braces: list[tuple[int, int] | None] = []
    for token in BRACE.finditer(text):
        if token[0] == "}":
            box = braces.pop() if braces else None
            if box and not (boxes and boxes[-1].start > box[0]):
                boxes.append(Box(*box, token.start(), token.end()))
        elif token["bare"]:
            boxes.append(Box(token.start(), token.start("bare"), token.end(), token.end()))
        elif token[0] == "{":
            braces.append(None)
        elif token[0].endswith("{") and len(token[0]) > 2:
            braces.append((token.start(), token.end()))
    return None if any(braces) else boxes
