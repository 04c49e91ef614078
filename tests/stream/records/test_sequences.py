"""Two sequences of three and two tokens; of the first the last two were sampled. And a rollout of
three sequences, of which the second branches from the first and the third from the second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.assemble import select_sequences
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records.compact import compact_ids, wide_ids
from streamrl.stream.records.sequences import (
    common_prefix,
    completion_lengths,
    completions,
    ranges,
    sampled_counts,
    sampled_indices,
    spans_of,
    split_ragged,
    values_by_sequence,
)
from tests.support.build import floats, group, spans

FIELDS = {**spans([0, 1, 1], [1, 1]), "policy_logprobs": floats(-1, -2, -3, -4)}
RECORD = structs.replace(group(sizes=(3, 2)), **FIELDS)


def test_sampled_tokens_are_those_within_spans():
    assert sampled_indices(RECORD).tolist() == [1, 2, 3, 4]
    assert sampled_counts(RECORD).tolist() == [2, 2]
    assert [values.tolist() for values in spans_of(RECORD)] == [[0, 1], [1, 0], [2, 2]]


def test_without_spans_every_token_was_sampled():
    plain = group(sizes=(3, 2))
    assert sampled_indices(plain).tolist() == [0, 1, 2, 3, 4]
    assert [values.tolist() for values in spans_of(plain)] == [[0, 1], [0, 0], [3, 2]]
    counts = {per: values.tolist() for per, values in values_by_sequence(plain).items()}
    assert counts == {"sequence": [1, 1], "token": [3, 2], "span": [1, 1], "sampled": [3, 2]}


def test_a_sequence_may_have_no_span_and_another_several():
    fields = {**spans([0, 0, 0], [1, 0, 1, 1]), "policy_logprobs": floats(-1, -2, -3)}
    record = structs.replace(group(sizes=(3, 4)), **fields)
    assert sampled_indices(record).tolist() == [3, 5, 6]
    assert sampled_counts(record).tolist() == [0, 3]


def test_ranges_follow_each_other():
    assert ranges(np.array([5, 0, 2]), np.array([2, 0, 3])).tolist() == [5, 6, 2, 3, 4]


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"span_starts": None}, "span_counts, span_starts and span_lengths go together"),
        ({"span_counts": np.array([1], np.int32)}, "span_counts do not fit"),
        ({"span_counts": np.array([1, 2], np.int32)}, "span_counts do not fit"),
        ({"span_starts": np.array([2, 0], np.int32)}, "is not within its sequence"),
        ({"span_starts": np.array([-1, 0], np.int32)}, "span_starts: one is -1"),
        ({"span_lengths": np.array([2, 3], np.int32)}, "is not within its sequence"),
        ({"policy_logprobs": floats(-1)}, r"policy_logprobs has shape \[1\], expected \[4\]"),
        # the second span of a sequence begins within the first
        (spans([0, 1, 1], [1, 1]) | {"span_counts": np.array([2, 0], np.int32)}, "not within"),
    ],
)
def test_spans_that_are_none_are_refused(changed: dict[str, Any], cause: str):
    with pytest.raises(ValueError, match=cause):
        structs.replace(RECORD, **changed)


BRANCHING = structs.replace(
    group(sizes=(3, 2, 1)),
    uids=["a", "a", "a"],
    branches_from=np.array([0, 1, 1], np.int32),
    branches_at=np.array([0, 2, 3], np.int32),
)


def test_a_branch_has_the_first_tokens_of_the_sequence_that_it_branches_from():
    """Own tokens are 10 11 12, 13 14 and 15, after a prompt of two."""
    paths = completions(BRANCHING, BRANCHING.tokens)
    assert [path.tolist() for path in paths] == [[10, 11, 12], [10, 11, 13, 14], [10, 11, 13, 15]]
    assert completion_lengths(BRANCHING).tolist() == [3, 4, 4]
    assert BRANCHING.sequence_lengths.tolist() == [5, 6, 6] and BRANCHING.total_tokens == 17


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"branches_at": None}, "branches_from and branches_at go together"),
        ({"branches_at": np.array([0, 2], np.int32)}, "branches_at has 2 values, and there are 3"),
        ({"branches_at": np.array([0, -2, 0], np.int32)}, "branches_at: one is -2"),
        ({"branches_at": np.array([0, 4, 3], np.int32)}, "sequence 1 does not branch"),  # of three
        ({"branches_from": np.array([0, 1, 0], np.int32)}, "sequence 2 does not branch"),
        ({"branches_from": np.array([0, 2, 1], np.int32)}, "sequence 1 does not branch"),
        ({"uids": ["a", "a", "b"]}, "sequence 2 does not branch"),
    ],
)
def test_branches_that_are_none_are_refused(changed: dict[str, Any], cause: str):
    with pytest.raises(ValueError, match=cause):
        structs.replace(BRANCHING, **changed)


def anything(draws: np.random.Generator) -> dict[str, Any]:
    """The fields of a group of one to four sequences with branches and spans, of which one value
    may be any.
    """
    count = int(draws.integers(1, 5))
    own = draws.integers(0, 4, count)
    uids = np.sort(draws.choice(["a", "b"], count)).tolist()
    masks = [draws.integers(0, 2, size).tolist() for size in own]
    fields: dict[str, Any] = {"lengths": own.astype(np.int32), "uids": uids, **spans(*masks)}
    fields["branches_from"] = np.zeros(count, np.int32)
    fields["branches_at"] = np.zeros(count, np.int32)
    sizes = own.tolist()
    for sequence in range(1, count):
        source = int(draws.integers(0, sequence))
        if uids[source] == uids[sequence]:
            fields["branches_from"][sequence] = sequence - source
            fields["branches_at"][sequence] = draws.integers(0, sizes[source] + 1)
            sizes[sequence] += int(fields["branches_at"][sequence])
    ids = draws.integers(0, int(draws.choice([2**16, 2**24, 2**32])), int(own.sum()))
    fields["tokens"] = compact_ids(ids.astype(np.uint32))
    sampled = int(fields["span_lengths"].sum())
    fields["policy_logprobs"] = np.zeros(sampled, "<f4" if draws.random() < 0.5 else "<u2")
    if draws.random() < 0.7:
        name = str(draws.choice([name for name in fields if name != "uids"]))
        array = fields[name].copy()
        if len(array) and name != "tokens" and draws.random() < 0.8:
            wrong = [0, 1, 2, 3, -1, -(2**31), 2**31 - 1]
            array[draws.integers(len(array))] = np.array(draws.choice(wrong)).astype(array.dtype)
        else:
            array = array[:-1]
        fields[name] = array
    return fields


def test_any_branches_and_spans_are_refused_or_make_whole_sequences():
    """Its own tokens follow those that a sequence shares, and each sampled one is one of them."""
    draws = np.random.default_rng(0)
    kept = 0
    for _ in range(2_000):
        fields = anything(draws)
        try:
            made = structs.replace(group(sizes=[1] * len(fields["uids"])), **fields)
        except ValueError:
            continue
        kept += 1
        tokens = wide_ids(made.tokens)
        paths = completions(made, tokens)
        assert [len(path) for path in paths] == completion_lengths(made).tolist()
        for own, path in zip(split_ragged(tokens, made.lengths), paths, strict=True):
            assert path[len(path) - len(own) :].tolist() == own.tolist()
        indices = sampled_indices(made)
        assert len(indices) == len(made.policy_logprobs) == sampled_counts(made).sum()
        assert (np.diff(indices) > 0).all() and (indices < len(tokens)).all()
        assert decode("scored-group/1", encode(made)) is not None
        for keep in (np.array(made.uids) == "a", np.array(made.uids) == "b"):
            assert select_sequences(made, keep).total_tokens == made.sequence_lengths[keep].sum()
    assert 500 < kept < 1_500, "a case that always ends in the same way shows nothing"


def test_a_common_prefix_is_what_all_begin_with():
    one = np.array([1, 2, 3])
    assert common_prefix([one, np.array([1, 2, 4, 5])]) == 2
    assert common_prefix([one, one[:1]]) == 1 and common_prefix([one]) == 3
    assert common_prefix([]) == common_prefix([one, one[:0]]) == 0
