"""Rollouts to rows of a fixed length, and the ragged batch on the wire to the dense arrays that the learner takes."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from streamrl.batcher.masks import predictions
from streamrl.records import Batch


class RlExample(NamedTuple):
    """What the learner trains on. All arrays have shape (rows, max_seq_len), the same for every batch of a run.

    Position i of `loss_mask`, `advantages`, `policy_logprobs` and `reference_logprobs` speaks of the prediction of token i + 1 (`masks.py`).
    """

    input_ids: np.ndarray  # int32; 0 where padded
    loss_mask: np.ndarray  # float32: 1 where token i + 1 was sampled
    segment_ids: np.ndarray  # int32: 0 is padding, 1.. the rollouts of the row
    position_ids: np.ndarray  # int32: restarts at 0 in each segment
    advantages: np.ndarray  # float32; 0 outside the mask
    policy_logprobs: np.ndarray  # float32; 0 outside the mask
    reference_logprobs: np.ndarray  # float32; 0 until the learner or a scorer fills them in
    temperatures: np.ndarray  # float32: of the segment; 1 where padded


def pack(lengths: np.ndarray, max_seq_len: int, row_count: int) -> np.ndarray | None:
    """The row of each rollout, best fit, longest first: (n,) int32; or None when `row_count` rows of `max_seq_len` tokens do not hold them.

    `lengths`: (n,) int, tokens of each. Raises ValueError for one that is longer than a row.
    """
    if len(lengths) and int(lengths.max()) > max_seq_len:
        raise ValueError(f"rollout {int(lengths.argmax())} has {int(lengths.max())} tokens; a row holds {max_seq_len}")
    rows = np.empty(len(lengths), np.int32)
    free: list[tuple[int, int]] = []  # (free tokens, row), sorted: the tightest row that fits is found by bisection
    used = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(free, (length, -1))
        if place < len(free):
            space, row = free.pop(place)
        elif used < row_count:
            space, row = max_seq_len, used
            used += 1
        else:
            return None
        rows[index] = row
        if space > length:
            insort(free, (space - length, row))
    return rows


def expand(batch: Batch) -> RlExample:
    """The dense arrays of a batch. Whole-array work: no loop over rollouts."""
    shape = (batch.row_count, batch.max_seq_len)
    prompt_lengths = batch.prompt_lengths[batch.groups]
    totals = prompt_lengths + batch.lengths
    starts = starts_in_rows(batch.rows, totals)
    within = ragged_arange(totals)
    rollout = np.repeat(np.arange(len(totals)), totals)
    cell = (batch.rows.astype(np.int64) * batch.max_seq_len + starts)[rollout] + within

    behind_prompt = within - prompt_lengths[rollout]
    prompt_starts = (np.cumsum(batch.prompt_lengths) - batch.prompt_lengths)[batch.groups]
    own_starts = np.cumsum(batch.lengths) - batch.lengths
    own = behind_prompt >= 0
    own_index = (own_starts[rollout] + behind_prompt)[own]
    tokens = np.empty(len(cell), np.int32)
    tokens[own] = batch.tokens[own_index]
    tokens[~own] = batch.prompts[(prompt_starts[rollout] + within)[~own]]
    logprobs, sampled = np.zeros(len(cell), np.float32), np.zeros(len(cell), np.float32)
    logprobs[own] = batch.policy_logprobs[own_index]
    sampled[own] = 1.0 if batch.loss_mask is None else batch.loss_mask[own_index]

    def dense(values: np.ndarray, dtype: type, fill: float = 0) -> np.ndarray:
        whole = np.full(shape, fill, dtype)
        whole.reshape(-1)[cell] = values
        return whole

    mask, advantages, policy_logprobs = predictions(within, sampled, (sampled * batch.advantages[rollout], sampled * logprobs))
    return RlExample(
        input_ids=dense(tokens, np.int32),
        loss_mask=dense(mask, np.float32),
        segment_ids=dense(segment_numbers(batch.rows)[rollout], np.int32),
        position_ids=dense(within, np.int32),
        advantages=dense(advantages, np.float32),
        policy_logprobs=dense(policy_logprobs, np.float32),
        reference_logprobs=np.zeros(shape, np.float32),
        temperatures=dense(batch.temperatures[rollout], np.float32, 1),
    )


def ragged_arange(lengths: np.ndarray) -> np.ndarray:
    """0..lengths[0]-1, 0..lengths[1]-1, ... as one array: (sum of lengths,) int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - lengths, lengths)


def starts_in_rows(rows: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Where each rollout begins in its row, when a row is filled in the order of the arrays: (n,) int64."""
    order = np.argsort(rows, kind="stable")
    before = np.cumsum(totals[order], dtype=np.int64) - totals[order]
    first = np.searchsorted(rows[order], rows[order])  # the first rollout of the same row
    starts = np.empty(len(rows), np.int64)
    starts[order] = before - before[first] if len(rows) else before
    return starts


def segment_numbers(rows: np.ndarray) -> np.ndarray:
    """1, 2, ... for the rollouts of each row, in the order of the arrays: (n,) int64."""
    order = np.argsort(rows, kind="stable")
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order]) + 1
    return numbers
