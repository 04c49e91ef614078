"""The prompt of a conversation's next turn, which keeps the sampled tokens exactly as they were
sampled.

A server renders a conversation from its messages. The rendering may split an earlier answer into
other tokens than were sampled (a policy may sample `h`, `ello` where the tokenizer gives `hello`),
or it may change the text (some templates drop earlier thoughts). In the first case the next prompt
is the history, followed by what the rendering has after the last answer, so nothing is tokenized
again. In the second case there is no such prompt: the rendering is used as it is and begins another
training sequence.
"""

from __future__ import annotations

from collections.abc import Sequence


def continuation_index(history: Sequence[int], rendered: Sequence[int]) -> int | None:
    """Index in `rendered` of the first token after `history`, assuming that `rendered` starts with
    the same text. The caller verifies this by detokenizing, unless the tokens are identical.

    `history`: the last prompt and answer, whose last token ends a turn. The index is found by
    counting end-of-turn tokens, which are single tokens in every tokenization. None if there is no
    continuation.
    """
    if len(rendered) > len(history) and list(rendered[: len(history)]) == list(history):
        return len(history)
    end = history[-1]
    left = list(history).count(history[-1])
    for place, token in enumerate(rendered):
        left -= token == end
        if left == 0:
            return place + 1 if place + 1 < len(rendered) else None
    return None
