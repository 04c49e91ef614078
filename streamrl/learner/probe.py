"""The text of a probe, and the row in which the learner computes its logprobs. A server that serves
the version must answer the same (`inference/servers/probe.py`).
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from streamrl.learner.model.examples import RlExample
from streamrl.learner.model.model import single_sequence
from streamrl.stream.records import Batch, token_dtype
from streamrl.stream.records.compact import wide_ids
from streamrl.stream.records.sequences import completions, split_ragged

# What a policy is probed with before its first batch. In bfloat16 unlikely tokens are rounded more
# than those of a text: random ids differed by 0.070 in the mean where these differed by 0.041.
TEXT = (
    "A bakery sells bread for 3 dollars and cakes for 12 dollars. On Monday it sold 14 loaves and 5"
    " cakes, so it earned 3 * 14 + 12 * 5 = 42 + 60 = 102 dollars. On Tuesday the rain kept people"
    " at home, and it earned only half of that: 51 dollars. In both days together it earned 153"
    " dollars."
)
MIN_TOKENS = 8  # of the text; a tokenizer that knows fewer of them is probed with random ids
# A kernel for packed rows takes a limited number of segments: `attention.CUDNN_SEGMENTS`, of which
# the padding is one.
MAX_COPIES = 32


def text_tokens(tokenizer: PreTrainedTokenizerBase, count: int, below: int) -> np.ndarray:
    """(count,) unsigned: the beginning of TEXT, again and again if it is too short.

    Ids from `below` on and those of unknown words are left out. If too few are left, the ids are
    random.
    """
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    known = [token for token in ids if token < below and token != tokenizer.unk_token_id]
    if len(known) < MIN_TOKENS:
        return random_tokens(0, count, below)
    return np.resize(np.array(known), count).astype(token_dtype(below))


def random_tokens(seed: int, count: int, below: int) -> np.ndarray:
    """(count,) unsigned: token ids that are drawn from those below `below`."""
    drawn = np.random.default_rng(seed).integers(0, below, count)
    return drawn.astype(token_dtype(below))


def batch_tokens(batch: Batch, seed: int, count: int, below: int) -> np.ndarray:
    """(n,) unsigned, n <= count: tokens that were trained on, with their prompts. They are those of
    a sequence that is drawn, and of the ones after it, around the end of the batch. Ids from
    `below` on, which the tokenizer does not know, are left out.
    """
    prompts = split_ragged(wide_ids(batch.prompts), batch.prompt_lengths)
    answers = completions(batch, wide_ids(batch.tokens))
    first = int(np.random.default_rng(seed).integers(len(answers)))
    tokens = np.empty(0, np.int64)
    for step in range(len(answers)):
        index = (first + step) % len(answers)
        sequence = np.concatenate((prompts[batch.groups[index]], answers[index]))
        tokens = np.concatenate((tokens, sequence[sequence < below]))
        if len(tokens) >= count:
            break
    return tokens[:count].astype(token_dtype(below))


def training_row(tokens: np.ndarray, row_length: int) -> RlExample:
    """A packed row of `row_length` tokens with copies of the text, as many as fit but at most
    MAX_COPIES. So it is computed as in training, by the same kernel, and where one segment sees
    another the logprobs are not those of a server.
    """
    one = single_sequence(tokens)
    copies = copies_in(row_length, len(tokens))
    padding = ((0, 0), (0, row_length - copies * len(tokens)))

    def filled(array: np.ndarray) -> np.ndarray:
        return np.pad(np.tile(array, copies), padding)

    row = RlExample(**{k: filled(v) for k, v in one._asdict().items() if v is not None})
    numbers = np.repeat(np.arange(1, copies + 1, dtype=np.int32), len(tokens))[None]
    temperatures = np.ones((1, row_length), np.float32)
    return row._replace(segment_ids=np.pad(numbers, padding), temperatures=temperatures)


def last_copy(row: np.ndarray, count: int) -> np.ndarray:
    """(count - 1,) float32: the logprobs of the last copy's tokens but the first. `row`: (1,
    row_length) float32, of a `training_row` of `count` tokens.
    """
    start = (copies_in(row.shape[1], count) - 1) * count
    return row[0, start : start + count - 1]


def copies_in(row_length: int, count: int) -> int:
    """How many copies of a text of `count` tokens a `training_row` of that length has."""
    return min(row_length // count, MAX_COPIES)
