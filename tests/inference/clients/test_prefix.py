"""Where a rendered conversation goes on behind what was said: by hand, and on a real BPE tokenizer
with templates that keep and that rewrite.
"""

from __future__ import annotations

import pytest

from streamrl.inference.clients.prefix import after_answer, continuation_index, with_answer
from tests.support.bpe import TEMPLATE, THINKS, bpe, byte_tokens

END = 9


@pytest.mark.parametrize(
    ("history", "rendered", "place"),
    [
        ([1, 2, END], [1, 2, END, 7, 8], 3),  # the same tokens
        ([1, 2, 3, END], [1, 5, END, 7, 8], 3),  # other tokens up to the end of the answer
        ([1, END, 2, 3, END], [1, END, 5, END, 7], 4),  # the second end
        ([1, END, 2, END], [1, END, 5], None),  # fewer ends
        ([1, 2, END], [1, 2, END], None),  # nothing follows
        ([1, 2, END], [], None),
    ],
)
def test_the_place_by_hand(history: list[int], rendered: list[int], place: int | None):
    assert continuation_index(history, rendered) == place


def test_an_answer_in_other_tokens_keeps_them_and_what_follows_is_the_templates():
    tokenizer = bpe(TEMPLATE)
    talk = [{"role": "user", "content": "hello world"}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True)
    for answer in ("hello hello", "caf\u00e9 \u20ac"):
        history = [*prompt, *byte_tokens(tokenizer, answer), tokenizer.eos_token_id]
        more = [*talk, {"role": "assistant", "content": answer}, {"role": "tool", "content": "two"}]
        rendered = tokenizer.apply_chat_template(more, add_generation_prompt=True)
        place = continuation_index(history, rendered)
        assert place is not None and tokenizer.decode(rendered[:place]) == tokenizer.decode(history)
        assert answer != "hello hello" or rendered[:place] != history
        assert tokenizer.decode(rendered[place:]) == "\n<|tool|>two<eos>\n<|assistant|>"


def test_a_template_that_rewrites_history_is_known_by_its_text():
    tokenizer = bpe(THINKS)
    talk = [{"role": "user", "content": "hello"}]
    history = [
        *tokenizer.apply_chat_template(talk, add_generation_prompt=True),
        *tokenizer.encode("two plus two! four<eos>"),
    ]
    more = [
        *talk,
        {"role": "assistant", "content": "two plus two! four"},
        {"role": "user", "content": "hello"},
    ]
    rendered = tokenizer.apply_chat_template(more, add_generation_prompt=True)
    place = continuation_index(history, rendered)
    assert place is not None and tokenizer.decode(rendered[:place]) != tokenizer.decode(history)


@pytest.mark.parametrize(
    ("one", "other", "following"),
    [
        ([1, 2, END, 7, 8], [1, 3, END, 7, 8], [7, 8]),
        ([1, 2, END, 7, 8], [1, 3, 4, END, 7, 8], [7, 8]),  # another length
        ([1, 2, END], [1, 3, END], []),  # nothing follows
        ([1, 2, 5, END, 7], [1, 3, 5, END, 7], None),  # the template closes answers with 5
        ([1, END, 7, 8], [1, END, 7, 8], None),  # it drops what the answer says
        ([1, 2], [1, 3], None),
    ],
)
def test_what_follows_an_answer_by_hand(
    one: list[int], other: list[int], following: list[int] | None
):
    assert after_answer(one, other, END) == following


def test_what_follows_an_answer_is_found_whatever_the_template_makes_of_it():
    tokenizer = bpe(THINKS)
    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "two plus two! four"},
        {"role": "tool", "content": "world"},
    ]
    one, other = (
        tokenizer.apply_chat_template(with_answer(talk, 1, text), add_generation_prompt=True)
        for text in "ab"
    )
    following = after_answer(one, other, tokenizer.eos_token_id)
    assert following is not None
    assert tokenizer.decode(following) == "\n<|tool|>world<eos>\n<|assistant|>"
