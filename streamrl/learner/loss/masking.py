"""Sequences that cannot be trained on are masked, so that one of them does not cost the whole batch
or end the learner.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from streamrl.buffer.validation import TEMPERATURES
from streamrl.stream.records import Batch
from streamrl.stream.records.compact import wide_ids

MAX_CELLS = 2**31  # of a batch: rows times tokens of a row


class MaskedBatch(NamedTuple):
    """A batch that is safe to give to the model."""

    batch: Batch
    masked: np.ndarray  # (n,) bool: the sequences that are not trained on


def mask_untrainable(batch: Batch, vocab_size: int) -> MaskedBatch:
    """Mask each sequence that has a token id without an embedding, or a temperature that logits
    cannot be divided by.

    `vocab_size`: valid ids are below it. A masked sequence stays in its row, with unknown ids
    replaced by 0 and its temperature 1. If nothing is masked, the batch itself is returned. Raises
    ValueError for a batch whose sequences do not fit its rows.
    """
    check_layout(batch)
    prompts = wide_ids(batch.prompts)
    tokens = wide_ids(batch.tokens)
    unknown_prompt = prompts >= vocab_size
    unknown_token = tokens >= vocab_size
    bad_groups = np.zeros(len(batch.group_ids), bool)
    bad_groups[np.repeat(np.arange(len(batch.group_ids)), batch.prompt_lengths)[unknown_prompt]] = (
        True
    )
    bad = bad_groups[batch.groups]
    bad[np.repeat(np.arange(len(batch.uids)), batch.lengths)[unknown_token]] = True
    if batch.branches_from is not None:
        for sequence in np.flatnonzero(batch.branches_from):  # with the sequences that share tokens
            bad[sequence] |= bad[sequence - batch.branches_from[sequence]]
    bad |= ~((batch.temperatures >= TEMPERATURES[0]) & (batch.temperatures <= TEMPERATURES[1]))
    if not bad.any():
        return MaskedBatch(batch, bad)
    changed = msgspec.structs.replace(
        batch,
        prompts=np.where(unknown_prompt, 0, prompts).astype(prompts.dtype),
        tokens=np.where(unknown_token, 0, tokens).astype(tokens.dtype),
        temperatures=np.where(bad, 1, batch.temperatures).astype(np.float32),
    )
    return MaskedBatch(changed, bad)


def check_layout(batch: Batch) -> None:
    """Check that every sequence is in a row of the batch. Raises ValueError."""
    me = f"batch {batch.number}"
    if not 0 <= batch.row_count * batch.max_seq_len <= MAX_CELLS:
        raise ValueError(f"{me}: {batch.row_count} rows of {batch.max_seq_len} tokens")
    if not len(batch.uids):
        return
    if batch.groups.min() < 0 or batch.groups.max() >= len(batch.group_ids):
        raise ValueError(
            f"{me}: a sequence is of group {int(batch.groups.max())}, and there are"
            f" {len(batch.group_ids)}"
        )
    if batch.rows.min() < 0 or batch.rows.max() >= batch.row_count:
        raise ValueError(
            f"{me}: a sequence is in row {int(batch.rows.max())}, and there are {batch.row_count}"
        )
    filled = np.bincount(batch.rows, batch.sequence_lengths, batch.row_count)
    if filled.max() > batch.max_seq_len:
        raise ValueError(
            f"{me}: row {int(filled.argmax())} is given {int(filled.max())} tokens, and holds"
            f" {batch.max_seq_len}"
        )
