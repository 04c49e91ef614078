"""Two sequences of three and two tokens; of the first the last two were sampled. And a rollout of
three sequences, of which the second branches from the first and the third from the second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.stream.records.sequences import (
    common_prefix,
    completion_lengths,
    completions,
    ranges,
    sampled_counts,
    sampled_indices,
    spans_of,
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


def test_a_common_prefix_is_what_all_begin_with():
    one = np.array([1, 2, 3])
    assert common_prefix([one, np.array([1, 2, 4, 5])]) == 2
    assert common_prefix([one, one[:1]]) == 1 and common_prefix([one]) == 3
    assert common_prefix([]) == common_prefix([one, one[:0]]) == 0
