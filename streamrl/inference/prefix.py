"""The prompt of a conversation's next turn, token for token: what was sampled stays as it was
sampled.

A server renders a conversation from its texts. That may cut an earlier answer into other tokens
than those that were sampled (a policy is free to say `h`, `ello`; the tokenizer says `hello`), or
say something else altogether (templates that drop earlier thoughts). In the first case the next
prompt is what there is, followed by what the rendering has behind the last answer's end: nothing
that was seen is tokenised again. In the second there is no such prompt: the rendering is taken as
it is, and begins another sequence to train on.
"""

from __future__ import annotations

from collections.abc import Sequence


def behind(history: Sequence[int], rendered: Sequence[int]) -> int | None:
    """Where in `rendered` the text behind `history` begins, if it says the same so far: to be
    checked by their texts, unless the tokens are the same.

    `history`: the last prompt and answer, whose last token ends a turn. The place is behind as many
    such tokens as `history` has: they are tokens of their own in any tokenisation. None when
    `rendered` has fewer, or nothing follows.
    """
    if len(rendered) > len(history) and list(rendered[: len(history)]) == list(history):
        return len(history)
    end, left = history[-1], list(history).count(history[-1])
    for place, token in enumerate(rendered):
        left -= token == end
        if left == 0:
            return place + 1 if place + 1 < len(rendered) else None
    return None
