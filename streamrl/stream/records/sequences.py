"""The sequences of a group or a batch: from which other one each branches, which of its tokens were
sampled, and how many values of a column belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from streamrl.stream.records.compact import wide_ids
from streamrl.stream.records.fields import Array, total_of

if TYPE_CHECKING:
    from streamrl.stream.records.batches import Batch, ScoredGroup


def counts_of(what: str, record: ScoredGroup | Batch) -> dict[str, int]:
    """How many values the columns by sequence, token, span and sampled token have. Raises
    ValueError for lengths, spans or branches that are none. `what`: the record, for the message.
    """
    sequences = len(record.uids)
    tokens = total_of(f"{what}: lengths", record.lengths)
    _check_branches(what, record)
    counts = {"sequence": sequences, "token": tokens, "span": sequences, "sampled": tokens}
    span_counts = record.span_counts
    starts = record.span_starts
    lengths = record.span_lengths
    if span_counts is None and starts is None and lengths is None:
        return counts
    if span_counts is None or starts is None or lengths is None:
        raise ValueError(f"{what}: span_counts, span_starts and span_lengths go together")
    counts["span"] = total_of(f"{what}: span_counts", span_counts)
    counts["sampled"] = total_of(f"{what}: span_lengths", lengths)
    _check_spans(what, record.lengths, span_counts, starts, lengths, counts)
    return counts


def _check_spans(
    what: str,
    lengths: Array,
    span_counts: Array,
    span_starts: Array,
    span_lengths: Array,
    counts: dict[str, int],
) -> None:
    """Each span is within its sequence, after the spans before it."""
    total_of(f"{what}: span_starts", span_starts)
    same = len(span_counts) == len(lengths) == counts["sequence"]
    if not (same and len(span_starts) == len(span_lengths) == counts["span"]):
        raise ValueError(f"{what}: span_counts do not fit span_starts, span_lengths or lengths")
    sequences = np.repeat(np.arange(len(lengths)), span_counts)
    ends = span_starts.astype(np.int64) + span_lengths
    first = np.append(True, sequences[1:] != sequences[:-1])[: len(ends)]
    earliest = np.where(first, 0, np.append(0, ends[:-1])[: len(ends)])
    if (ends > lengths[sequences]).any() or (span_starts < earliest).any():
        raise ValueError(f"{what}: a span of sampled tokens is not within its sequence")


def _check_branches(what: str, record: ScoredGroup | Batch) -> None:
    """Each branch has its first tokens from an earlier sequence of its rollout."""
    distances = record.branches_from
    shared = record.branches_at
    if distances is None and shared is None:
        return
    if distances is None or shared is None:
        raise ValueError(f"{what}: branches_from and branches_at go together")
    count = len(record.uids)
    for name, array in (("branches_from", distances), ("branches_at", shared)):
        total_of(f"{what}: {name}", array)
        if not len(array) == len(record.lengths) == count:
            raise ValueError(f"{what}: {name} has {len(array)} values, and there are {count}")
    sizes = (record.lengths.astype(np.int64) + shared).tolist()
    for sequence in np.flatnonzero((distances > 0) | (shared > 0)).tolist():
        source = sequence - int(distances[sequence])
        if not (
            0 <= source < sequence
            and record.uids[source] == record.uids[sequence]
            and shared[sequence] <= sizes[source]
        ):
            raise ValueError(
                f"{what}: sequence {sequence} does not branch from an earlier one of its rollout"
            )


def completion_lengths(record: ScoredGroup | Batch) -> np.ndarray:
    """(n,) int: the tokens of each sequence after its prompt, with those that it shares."""
    return record.lengths if record.branches_at is None else record.lengths + record.branches_at


def completions(record: ScoredGroup | Batch, values: np.ndarray) -> list[np.ndarray]:
    """The values of each sequence after its prompt, with those of the tokens that it shares.
    `values`: of a column by token. They are views where a sequence does not branch from another.
    """
    own = split_ragged(values, record.lengths)
    if record.branches_from is None or record.branches_at is None:
        return own
    distances = record.branches_from.tolist()
    shared = record.branches_at.tolist()
    for sequence, distance in enumerate(distances):
        if distance:
            before = own[sequence - distance][: shared[sequence]]
            own[sequence] = np.concatenate((before, own[sequence]))
    return own


def split_ragged(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Views of the consecutive parts of `array` that have these lengths."""
    ends = np.cumsum(lengths).tolist()
    return [array[end - n : end] for n, end in zip(lengths.tolist(), ends, strict=True)]


def common_prefix(arrays: Sequence[np.ndarray]) -> int:
    """The number of ids that all of these arrays begin with, compact or not."""
    shared = min([len(array) for array in arrays], default=0)
    if not shared:
        return 0
    if len({array.dtype for array in arrays}) > 1:
        arrays = [wide_ids(array).astype(np.uint32) for array in arrays]
    # Comparing bytes takes a tenth of the time of comparing values.
    head = arrays[0][:shared].tobytes()
    for array in arrays[1:]:
        if array[:shared].tobytes() != head:
            differs = array[:shared] != arrays[0][:shared]
            shared = int(differs.argmax()) if differs.any() else shared
            head = arrays[0][:shared].tobytes()
    return shared


def sampled_counts(record: ScoredGroup | Batch) -> np.ndarray:
    """(n,) int: how many tokens of each sequence were sampled."""
    if record.span_counts is None:
        return record.lengths
    sequences = np.repeat(np.arange(len(record.uids)), record.span_counts)
    return np.bincount(sequences, record.span_lengths, len(record.uids)).astype(np.int64)


def sampled_turns(record: ScoredGroup | Batch) -> np.ndarray:
    """(n,) int: how many stretches of each sequence were sampled without a break."""
    sequences, starts, lengths = spans_of(record)
    ends = starts.astype(np.int64) + lengths
    continues = np.zeros(len(sequences), bool)
    continues[1:] = (sequences[1:] == sequences[:-1]) & (starts[1:] == ends[:-1])
    return np.bincount(sequences[(lengths > 0) & ~continues], minlength=len(record.uids))


def sums_from(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(m,) int32: the sums of the stretches of `values` that begin at `starts`, which ascend."""
    sums = np.add.reduceat(values, starts) if len(starts) else values[:0]
    return sums.astype(np.int32)


def values_by_sequence(record: ScoredGroup | Batch) -> dict[str, np.ndarray]:
    """(n,) int: how many values each sequence has, of the columns by sequence, token, span and
    sampled token.
    """
    ones = np.ones(len(record.uids), np.int32)
    return {
        "sequence": ones,
        "token": record.lengths,
        "span": ones if record.span_counts is None else record.span_counts,
        "sampled": sampled_counts(record),
    }


def spans_of(record: ScoredGroup | Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sequence, the first token and the length of each span: (spans,) int each."""
    if record.span_counts is None or record.span_starts is None or record.span_lengths is None:
        sequences = np.arange(len(record.uids))
        return sequences, np.zeros(len(sequences), np.int32), record.lengths
    sequences = np.repeat(np.arange(len(record.uids)), record.span_counts)
    return sequences, record.span_starts, record.span_lengths


def sampled_indices(record: ScoredGroup | Batch) -> np.ndarray:
    """(sampled,) int64: which of `tokens` were sampled."""
    sequences, starts, lengths = spans_of(record)
    first = np.cumsum(record.lengths, dtype=np.int64) - record.lengths
    return ranges(first[sequences] + starts, lengths)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of all these ranges, one range after another: (sum of lengths,) int64."""
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum(dtype=np.int64)))
