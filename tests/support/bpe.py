"""A real byte-level BPE tokenizer, trained here: spaces are `Ġ`, characters beyond ASCII are split
over tokens, and a template marks the turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "hello world, what is two plus two?",
    "two plus two is four",
    "the answer is four",
    "user assistant hello hello world",
] * 5
SPECIAL = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>\n{% endfor"
    " %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKS = TEMPLATE.replace(
    "message['content']",
    "(message['content'].split('!')[-1] if message['role'] == 'assistant' else message['content'])",
)


def bpe(
    template: str | None = TEMPLATE,
    text: Sequence[str] = TEXT,
    special: Sequence[str] = SPECIAL,
    vocab_size: int = 320,
) -> PreTrainedTokenizerFast:
    """Some 300 tokens. `THINKS` as the template drops what an earlier answer says before `!`, as
    templates drop thoughts.

    `text`: what the tokenizer is trained on. `special`: the first two pad, and end a sequence.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=special[1],
        pad_token=special[0],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def byte_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The text with a token for each byte, and special tokens whole. A policy may sample it like
    this; the tokenizer never cuts it so.
    """
    words = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    return [
        tokenizer.convert_tokens_to_ids(byte)
        for word in words
        for byte in ([word] if word in SPECIAL else word)
    ]  # type: ignore[misc]
