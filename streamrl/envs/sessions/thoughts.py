"""Splits an answer into its thoughts, such as what is between `<think>` and `</think>`, and the
rest. Sessions and rewards know the same tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# The tags that models write around their thoughts. A chat template may write the opening one. A
# group that is not empty tells that the tag closes a thought.
_TAG = re.compile(
    r"(?i)<(/?)(?:seed:)?(?:think|thinking|thoughts?|reasoning)\s*>|\[(/?)THINK\]|◁(/?)think▷"
    r"|<\|(?:begin|(end))_of_thought\|>|<\|(?:START|(END))_THINKING\|>"
    r"|<\|inner_(?:prefix|(suffix))\|>"
    # gpt-oss thinks in a channel, which the next one ends. A server may leave out its control
    # tokens: "analysis...assistantfinal...".
    r"|<\|channel\|>(?:analysis|((?:final|commentary)[^<]*)(?:<\|constrain\|>\w*)?)<\|message\|>"
    r"|\Aanalysis(?=.*?assistantfinal)|(assistantfinal)"
    r"|<\|channel>thought\b|(<channel\|>)",
    re.DOTALL | re.ASCII,
)
# Each tag has one of these words, in small letters. Looking for words is much faster.
_WORDS = ("think", "thought", "reasoning", "<|inner_", "channel", "assistantfinal")


def _tags(text: str) -> Iterator[re.Match[str]]:
    small = text.lower()
    if not any(word in small for word in _WORDS):
        return iter(())
    return _TAG.finditer(text)


def spans_outside_thoughts(text: str) -> Iterator[tuple[int, int]]:
    """The parts of an answer that are no thoughts, by their first character and the one after their
    last. A chat template may have opened the first thought, and the last may never be closed: a
    part is a thought if an opening tag is before it or a closing one after it.
    """
    start = 0
    is_open = False
    for tag in _tags(text):
        closes = any(tag.groups())
        if not is_open and not closes:
            yield start, tag.start()
        is_open = not closes
        start = tag.end()
    if not is_open:
        yield start, len(text)


def without_thoughts(text: str) -> str:
    """What an answer answers. A text without thoughts stays as it is."""
    if next(_tags(text), None) is None:
        return text
    return "".join(text[start:end] for start, end in spans_outside_thoughts(text)).strip()


def after_thoughts(text: str) -> str | None:
    """What follows the last thought; all of the text if there is none. None if one is open."""
    end = 0
    is_open = False
    for tag in _tags(text):
        is_open = not any(tag.groups())
        end = tag.end()
    return None if is_open else text[end:]


def thoughts_of(text: str) -> str:
    """The thoughts of an answer; empty if it has none."""
    thoughts = list[str]()
    place = 0
    for start, end in spans_outside_thoughts(text):
        thoughts.append(text[place:start])
        place = end
    thoughts.append(text[place:])
    return "\n\n".join(filter(None, (_TAG.sub("", part).strip() for part in thoughts)))
