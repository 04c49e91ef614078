"""The prompt of a conversation's next turn, in which sampled tokens stay exactly as they were
sampled.

A server renders a conversation from its messages. The rendering may split an earlier answer into
other tokens than were sampled (a policy may sample `h`, `ello` where the tokenizer gives `hello`),
or it may change the text (some templates drop earlier thoughts). In the first case the next prompt
is the history, followed by the rendered tokens after the last answer, so no answer is tokenized
again. In the second case the rendering is used as it is, and begins another training sequence; or,
under `model.history: keep`, the history stays all the same, followed by what the template writes
after an answer (`after_answer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""An OpenAI chat message."""


@dataclass(frozen=True)
class Prefix:
    """What a prompt continues from: the last prompt of its conversation and the answer to it."""

    # Their ids. The prompt begins with them unless the template rewrites their text; a request
    # without messages has nothing else.
    tokens: Sequence[int] = ()
    # Gave that answer, and is asked again while it is hardly busier than the others.
    server: str = ""
    # How many of the request's messages follow that answer. By it the tokens are kept where the
    # template rewrites them (`model.history: keep`). 0, or all of them: that answer may not be
    # among the messages.
    new_messages: int = 0


NO_PREFIX = Prefix()
"""The prefix of a request that begins a conversation."""


def continuation_index(history: Sequence[int], rendered: Sequence[int]) -> int | None:
    """Index in `rendered` of the first token after `history`, assuming that `rendered` starts with
    the same text. The caller verifies this by detokenizing, unless the tokens are identical.

    `history`: (n,) token ids of the last prompt and answer, whose last token ends a turn, n > 0.
    `rendered`: (m,) token ids. The index is found by counting end-of-turn tokens, which are single
    tokens in every tokenization. None if there is no continuation.
    """
    if len(rendered) > len(history) and list(rendered[: len(history)]) == list(history):
        return len(history)
    end_of_turn = history[-1]
    turns_left = list(history).count(end_of_turn)
    for index, token in enumerate(rendered):
        if token == end_of_turn:
            turns_left -= 1
        if turns_left == 0:
            return index + 1 if index + 1 < len(rendered) else None
    return None


def with_answer(messages: Sequence[Message], index: int, text: str) -> list[Message]:
    """The messages with `text` as the content of message number `index`."""
    changed = list(messages)
    changed[index] = {**changed[index], "content": text}
    return changed


def after_answer(one: Sequence[int], other: Sequence[int], end_of_turn: int) -> list[int] | None:
    """The tokens that follow an answer, from two renderings that differ in its text alone.

    `one`: (m,) and `other`: (k,) token ids. They end alike from the token on that closes the
    answer. None if that is not `end_of_turn`: then the answer was cut off, or the template closes
    answers otherwise than the policy does.
    """
    suffix = common_suffix(one, other)
    is_same = len(suffix) == len(one) == len(other)
    if is_same or not suffix or suffix[0] != end_of_turn:
        return None
    return suffix[1:]


def common_suffix(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The longest sequence of tokens with which both end."""
    count = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        count += 1
    return list(one[len(one) - count :])
