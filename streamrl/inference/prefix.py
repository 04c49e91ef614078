"""The prompt of a conversation's next turn, in which sampled tokens stay exactly as they were
sampled.

A server renders a conversation from its messages. The rendering may split an earlier answer into
other tokens than were sampled (a policy may sample `h`, `ello` where the tokenizer gives `hello`),
or it may change the text (some templates drop earlier thoughts). In the first case the next prompt
is the history, followed by the rendered tokens after the last answer, so no answer is tokenized
again. In the second case the rendering is used as it is, and begins another training sequence.
"""

from __future__ import annotations

from collections.abc import Sequence


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
