"""Two sequences of three and two tokens; of the first the last two were sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.stream.records.sequences import (
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
