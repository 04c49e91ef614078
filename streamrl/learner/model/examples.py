"""RlExample is what the learner trains on: the ragged arrays of a Batch, laid out densely in rows.

This file knows nothing of JAX. The scorer uses it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from streamrl.stream.records import Batch, columns_of
from streamrl.stream.records.compact import wide_ids, wide_logprobs
from streamrl.stream.records.sequences import completions, spans_of, split_ragged


class RlExample(NamedTuple):
    """Dense arrays of shape (rows, max_seq_len), which are those of the batch.

    Position i of `loss_mask`, `advantages`, the logprobs and the weights of losses is about the
    prediction of token i + 1.
    """

    input_ids: np.ndarray  # int32; 0 where padded
    loss_mask: np.ndarray  # float32: 1 where token i + 1 was sampled
    segment_ids: np.ndarray  # int32: 0 is padding, 1.. are the sequences of the row
    position_ids: np.ndarray  # int32: restarts at 0 in each segment
    advantages: np.ndarray  # float32; 0 outside the mask
    policy_logprobs: np.ndarray  # float32; 0 outside the mask
    reference_logprobs: np.ndarray  # float32; 0 until the learner or a scorer fills them in
    temperatures: np.ndarray  # float32: of the segment; 1 where padded
    # float32; 0 outside the mask. None: 1 within it
    policy_gradient_weights: np.ndarray | None = None
    cross_entropy_weights: np.ndarray | None = None  # float32. None: 0
    teacher_kl_weights: np.ndarray | None = None  # float32. None: 0
    teacher_logprobs: np.ndarray | None = None  # float32; None: no teacher was asked
    # (rows, max_seq_len, layers, k) uint8 or uint16: the experts that token i itself was sent to,
    # counted from 1; 0 where they are not known
    routed_experts: np.ndarray | None = None


# The columns by sampled token of a batch that are arrays of an example, under the same name. One
# with a default of None is there where the batch has it.
SAMPLED_COLUMNS = tuple(
    name
    for name, column in columns_of(Batch).items()
    if column.per == "sampled" and name in RlExample._fields
)


def empty_example(row_count: int, max_seq_len: int, optional: Collection[str] = ()) -> RlExample:
    """An example that is all padding. `optional`: fields with a default that it has too, which are
    never `routed_experts`.

    Its arrays are parts of one piece of memory, which is large enough for the kernel's huge pages:
    touching eight small pieces takes ten times as long.
    """
    names = [
        name
        for name in RlExample._fields
        if name not in RlExample._field_defaults or (name in optional and name != "routed_experts")
    ]
    memory = np.zeros((len(names), row_count, max_seq_len), np.float32)
    arrays: dict[str, np.ndarray] = dict(zip(names, memory, strict=True))
    for name in ("input_ids", "segment_ids", "position_ids"):
        arrays[name] = arrays[name].view(np.int32)
    arrays["temperatures"][:] = 1
    return RlExample(**arrays)


def expand(batch: Batch, masked: np.ndarray | None = None) -> RlExample:
    """The dense arrays of a batch. `masked`: (n,) bool, the sequences that are not trained on.

    The model reads token i to predict token i + 1, so what is known of a token is one position
    before it. The first token of a sequence has no predictor and cannot train. In the example of
    docs/design/logprobs.md, with seven prompt tokens and one sampled token, the loss mask is
    [0, 0, 0, 0, 0, 0, 1, 0].
    """
    columns = [name for name in SAMPLED_COLUMNS if getattr(batch, name) is not None]
    dense = empty_example(batch.row_count, batch.max_seq_len, optional=columns)
    arrays = dense._asdict()
    flat = dense._replace(
        **{name: array.reshape(-1) for name, array in arrays.items() if array is not None}
    )
    prompts = split_ragged(wide_ids(batch.prompts), batch.prompt_lengths)
    segments = [0] * batch.row_count  # the sequences that each row has so far
    positions = np.arange(batch.max_seq_len, dtype=np.int32)
    per_sequence = zip(
        sequence_starts(batch),
        batch.rows.tolist(),
        batch.groups.tolist(),
        batch.temperatures.tolist(),
        completions(batch, wide_ids(batch.tokens)),
        strict=True,
    )
    for start, row, group, temperature, completion in per_sequence:
        prompt = prompts[group]
        first = start + len(prompt)
        end = first + len(completion)
        segments[row] += 1
        flat.input_ids[start:first] = prompt
        flat.input_ids[first:end] = completion
        flat.segment_ids[start:end] = segments[row]
        flat.position_ids[start:end] = positions[: end - start]
        if temperature != 1:  # it is 1 from the start
            flat.temperatures[start:end] = temperature

    # each dense array that is filled by sampled token, and its values
    by_token = [(getattr(flat, name), wide_logprobs(getattr(batch, name))) for name in columns]
    if batch.token_advantages is not None:
        by_token.append((flat.advantages, batch.token_advantages))
    advantages = batch.advantages.tolist()
    for sequence, position, number, length in sampled_spans(batch):
        if masked is not None and masked[sequence]:
            continue
        predicting = slice(position, position + length)
        flat.loss_mask[predicting] = 1
        if batch.token_advantages is None:
            flat.advantages[predicting] = advantages[sequence]
        for array, values in by_token:
            array[predicting] = values[number : number + length]
    return dense._replace(routed_experts=dense_experts(batch))


def sampled_spans(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """Each span of sampled tokens that can train: its sequence, the position in the flattened dense
    arrays that is about its first token, the number of that token among the sampled ones, and its
    length. A first token of a sequence, which has no predictor, is left out.
    """
    sequences, starts, lengths = spans_of(batch)
    before = batch.sequence_lengths - batch.lengths
    firsts = np.array(sequence_starts(batch), np.int64) + before - 1
    positions = firsts[sequences] + starts
    numbers = np.cumsum(lengths, dtype=np.int64) - lengths
    # without a token before it, a sampled one has no predictor
    skipped = (before[sequences] + starts == 0) & (lengths > 0)
    return zip(
        sequences.tolist(),
        (positions + skipped).tolist(),
        (numbers + skipped).tolist(),
        (lengths - skipped).tolist(),
        strict=True,
    )


def dense_experts(batch: Batch) -> np.ndarray | None:
    """The experts that each token was sent to, at its own position: (row_count, max_seq_len,
    layers, k), 0 where they are not known. None for a batch that has none.
    """
    experts = batch.routed_experts
    if experts is None:
        return None
    dense = np.zeros((batch.row_count, batch.max_seq_len, *experts.shape[1:]), experts.dtype)
    flat = dense.reshape(-1, *experts.shape[1:])
    prompts: list[np.ndarray] | None = None
    if batch.prompt_routed_experts is not None:
        prompts = split_ragged(batch.prompt_routed_experts, batch.prompt_lengths)
    prompt_lengths = batch.prompt_lengths[batch.groups].tolist()
    per_sequence = zip(
        sequence_starts(batch),
        batch.groups.tolist(),
        prompt_lengths,
        completions(batch, experts),
        strict=True,
    )
    for start, group, prompt_length, completion in per_sequence:
        first = start + prompt_length
        if prompts is not None:
            flat[start:first] = prompts[group]
        flat[first : first + len(completion)] = completion
    return dense


def sequence_starts(batch: Batch) -> list[int]:
    """Where each sequence begins, counted through the rows one after another: the first cell of its
    row that the sequences before it leave.
    """
    free = [row * batch.max_seq_len for row in range(batch.row_count)]
    sizes = batch.sequence_lengths
    starts = list[int]()
    for row, size in zip(batch.rows.tolist(), sizes.tolist(), strict=True):
        starts.append(free[row])
        free[row] += size
    return starts


def rollout_numbers(batch: Batch) -> np.ndarray | None:
    """The number of the rollout at each position: (row_count, max_seq_len) int32, counted from 1, 0
    where padded. None where no rollout has forked, as `segment_ids` is the same then.

    A rollout that forked has several sequences under one uid, and they may be in several rows.
    """
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(batch.uids), 1)}
    if len(numbers) == len(batch.uids):
        return None
    dense = np.zeros((batch.row_count, batch.max_seq_len), np.int32)
    flat = dense.reshape(-1)
    sizes = batch.sequence_lengths
    per_sequence = zip(batch.uids, sequence_starts(batch), sizes.tolist(), strict=True)
    for uid, start, size in per_sequence:
        flat[start : start + size] = numbers[uid]
    return dense


def to_ragged(batch: Batch, dense: np.ndarray) -> np.ndarray:
    """The values of a dense array that are about the sampled tokens of the batch. A first token,
    which has no predictor, gets 0.

    `dense`: (row_count, max_seq_len) float32. Returns (sampled tokens,) float32.
    """
    flat = dense.reshape(-1)
    values = np.zeros(len(batch.policy_logprobs), np.float32)
    for _, position, number, length in sampled_spans(batch):
        values[number : number + length] = flat[position : position + length]
    return values


def to_dense(batch: Batch, values: np.ndarray) -> np.ndarray:
    """The inverse of `to_ragged`: the dense array with these values at the sampled tokens, and 0
    elsewhere.

    `values`: (sampled tokens,) float32. Returns (row_count, max_seq_len) float32. Raises ValueError
    where there are not as many values as sampled tokens.
    """
    count = len(batch.policy_logprobs)
    if values.shape != (count,):
        raise ValueError(
            f"batch {batch.number} has {count} sampled tokens, and {values.size} scores"
        )
    dense = np.zeros((batch.row_count, batch.max_seq_len), np.float32)
    flat = dense.reshape(-1)
    for _, position, number, length in sampled_spans(batch):
        flat[position : position + length] = values[number : number + length]
    return dense
