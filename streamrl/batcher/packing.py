"""Rollouts to rows of a fixed length, shared out to processes, and the ragged batch on the wire to
the dense arrays that the learner takes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from streamrl.records import Batch


class RlExample(NamedTuple):
    """What the learner trains on. All arrays have shape (rows, max_seq_len), the same for every
    batch of a run.

    Position i of `loss_mask`, `advantages`, `policy_logprobs` and `reference_logprobs` speaks of
    the prediction of token i + 1.
    """

    input_ids: np.ndarray  # int32; 0 where padded
    loss_mask: np.ndarray  # float32: 1 where token i + 1 was sampled
    segment_ids: np.ndarray  # int32: 0 is padding, 1.. the rollouts of the row
    position_ids: np.ndarray  # int32: restarts at 0 in each segment
    advantages: np.ndarray  # float32; 0 outside the mask
    policy_logprobs: np.ndarray  # float32; 0 outside the mask
    reference_logprobs: np.ndarray  # float32; 0 until the learner or a scorer fills them in
    temperatures: np.ndarray  # float32: of the segment; 1 where padded


def pack(
    lengths: np.ndarray,
    max_seq_len: int,
    row_count: int,
    processes: int = 1,
    costs: np.ndarray | None = None,
) -> np.ndarray | None:
    """The row of each sequence: (n,) int32; or None when `row_count` rows of `max_seq_len` tokens
    do not hold them.

    Longest first, each to the process with the least to do so far (LPT; Graham 1969, "Bounds on
    multiprocessing timing anomalies") that has room for it, and there into the tightest row (best
    fit decreasing). So every process has one of the longest before any has two. Process i has the
    rows from i * row_count / processes on. `lengths`: (n,) int, tokens of each. `costs`: (n,)
    float, what each is to its process; by default its tokens. Raises ValueError for a sequence that
    is longer than a row.
    """
    if len(lengths) and int(lengths.max()) > max_seq_len:
        raise ValueError(
            f"rollout {int(lengths.argmax())} has {int(lengths.max())} tokens; a row holds {max_seq_len}"
        )
    rows, of_each = np.empty(len(lengths), np.int32), row_count // processes
    shelves = [Shelf(max_seq_len, range(i * of_each, (i + 1) * of_each)) for i in range(processes)]
    least = [(0.0, i) for i in range(processes)]  # a heap: (cost so far, process)
    tokens, cost = lengths.tolist(), (lengths if costs is None else costs).tolist()
    for index in np.argsort(-lengths, kind="stable").tolist():
        length, full = tokens[index], list[tuple[float, int]]()
        while (row := shelves[least[0][1]].place(length)) is None:
            full.append(heappop(least))
            if not least:
                return None
        rows[index] = row
        done, process = least[0]
        heapreplace(least, (done + cost[index], process))
        for other in full:  # no room for this one; perhaps for the next
            heappush(least, other)
    return rows


class Shelf:
    """Rows of `max_seq_len` tokens that fill up."""

    def __init__(self, max_seq_len: int, rows: range) -> None:
        self._max_seq_len = max_seq_len
        self._empty = iter(rows)
        # (free tokens, row), sorted: the tightest row that fits is found by bisection
        self._free: list[tuple[int, int]] = []

    def place(self, length: int) -> int | None:
        """The tightest row that has `length` tokens free, which it then has no more; None if there
        is none.
        """
        found = bisect_left(self._free, (length, -1))
        if found < len(self._free):
            space, row = self._free.pop(found)
        else:
            space, row = self._max_seq_len, next(self._empty, None)
        if row is not None and space > length:
            insort(self._free, (space - length, row))
        return row


def expand(batch: Batch) -> RlExample:
    """The dense arrays of a batch.

    The model reads token i to predict token i + 1, so what is known of a token stands one position
    before it; a rollout's first token has no predictor and cannot train. The example of
    docs/design/logprobs.md, seven prompt tokens and one sampled: loss mask [0, 0, 0, 0, 0, 0, 1,
    0].
    """
    dense = blank(batch.row_count, batch.max_seq_len)
    flat = RlExample(*(array.reshape(-1) for array in dense))

    prompts, own, own_logprobs = (
        cut(batch.prompts, batch.prompt_lengths),
        cut(batch.tokens, batch.lengths),
        cut(batch.policy_logprobs, batch.lengths),
    )
    own_masks = None if batch.loss_mask is None else cut(batch.loss_mask, batch.lengths)
    free = [row * batch.max_seq_len for row in range(batch.row_count)]  # the next cell of each row
    count, numbers = [0] * batch.row_count, np.arange(batch.max_seq_len, dtype=np.int32)
    by_token = (
        None if batch.token_advantages is None else cut(batch.token_advantages, batch.lengths)
    )
    per_rollout = (
        batch.rows.tolist(),
        batch.groups.tolist(),
        batch.advantages.tolist(),
        batch.temperatures.tolist(),
    )
    for i, (row, group, advantage, temperature) in enumerate(zip(*per_rollout, strict=True)):
        start, prompt, tokens = free[row], prompts[group], own[i]
        first = start + len(prompt)
        end = free[row] = first + len(tokens)
        count[row] += 1
        flat.input_ids[start:first] = prompt
        flat.input_ids[first:end] = tokens
        flat.segment_ids[start:end] = count[row]
        flat.position_ids[start:end] = numbers[: end - start]
        if temperature != 1:  # as they are from the start
            flat.temperatures[start:end] = temperature
        skip = 0 if len(prompt) else 1
        predicting = slice(first - 1 + skip, end - 1)
        flat.loss_mask[predicting] = 1 if own_masks is None else own_masks[i][skip:]
        flat.advantages[predicting] = advantage if by_token is None else by_token[i][skip:]
        flat.policy_logprobs[predicting] = own_logprobs[i][skip:]
    if own_masks is not None:
        flat.advantages[:] *= flat.loss_mask
        flat.policy_logprobs[:] *= flat.loss_mask
    return dense


def rollouts_of(batch: Batch) -> np.ndarray | None:
    """The number of each position's rollout, from 1 on, 0 where padded: (row_count, max_seq_len)
    int32. None where no rollout has forked.

    A rollout that forked has several sequences under one uid, in rows of their own perhaps.
    """
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(batch.uids), 1)}
    if len(numbers) == len(batch.uids):
        return None
    found = np.zeros((batch.row_count, batch.max_seq_len), np.int32)
    free = [0] * batch.row_count
    sizes = batch.prompt_lengths[batch.groups] + batch.lengths
    for uid, row, size in zip(batch.uids, batch.rows.tolist(), sizes.tolist(), strict=True):
        found[row, free[row] : free[row] + size] = numbers[uid]
        free[row] += size
    return found


def predicted_at(batch: Batch) -> np.ndarray:
    """Where the dense arrays, flattened, speak of each token of `tokens`: (sum of lengths,) int64;
    -1 of a first token, which has no predictor.
    """
    free = [row * batch.max_seq_len for row in range(batch.row_count)]  # the next cell of each row
    places = [np.empty(0, np.int64)]
    for row, prompt, length in zip(
        batch.rows.tolist(),
        batch.prompt_lengths[batch.groups].tolist(),
        batch.lengths.tolist(),
        strict=True,
    ):
        first = free[row] + prompt
        free[row] = first + length
        places.append(np.arange(first - 1, first - 1 + length))
        if not prompt:
            places[-1][:1] = -1
    return np.concatenate(places)


def by_token(batch: Batch, dense: np.ndarray) -> np.ndarray:
    """What an array of shape (row_count, max_seq_len) float32 says of each token: (sum of lengths,)
    float32, ragged as `tokens`; 0 of a first one.
    """
    places = predicted_at(batch)
    return np.where(places < 0, np.float32(0), dense.reshape(-1)[places])


def by_row(batch: Batch, values: np.ndarray) -> np.ndarray:
    """The way back of `by_token`: (row_count, max_seq_len) float32, 0 elsewhere. Raises ValueError
    when they are not as many as its tokens.
    """
    places = predicted_at(batch)
    if values.shape != places.shape:
        raise ValueError(f"batch {batch.number} has {len(places)} tokens, not {values.size}")
    dense = np.zeros(batch.row_count * batch.max_seq_len, np.float32)
    dense[places[places >= 0]] = values[places >= 0]
    return dense.reshape(batch.row_count, batch.max_seq_len)


def blank(row_count: int, max_seq_len: int) -> RlExample:
    """Nothing but padding. One piece of memory, large enough for the kernel's huge pages: touching
    eight small ones takes ten times as long.
    """
    memory = np.zeros((len(RlExample._fields), row_count, max_seq_len), np.float32)
    arrays = dict(zip(RlExample._fields, memory, strict=True))
    arrays |= {
        name: arrays[name].view(np.int32) for name in ("input_ids", "segment_ids", "position_ids")
    }
    arrays["temperatures"][:] = 1
    return RlExample(**arrays)


def cut(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Its parts of these lengths, one after another: views."""
    return [
        array[end - n : end]
        for n, end in zip(lengths.tolist(), np.cumsum(lengths).tolist(), strict=True)
    ]
