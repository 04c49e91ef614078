"""The checks that all records share."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.stream.records import Column, JoinedGroup, ScoredGroup, columns_of, token_dtype
from streamrl.stream.records.fields import check_experts, check_floats, check_lengths, total_of
from tests.support.build import floats, group, rollout


def test_tokens_take_the_smallest_type_that_holds_the_vocabulary():
    assert [token_dtype(size).str for size in (18, 65_536, 65_537)] == ["<u2", "<u2", "<u4"]


def test_free_form_fields_have_a_depth():
    def nested(depth: int) -> dict[str, object]:
        value: object = 1
        for _ in range(depth - 1):
            value = [value]
        return {"x": value}

    rollout(metadata=nested(32))
    rollout(metadata={"wide": list(range(10_000))})
    with pytest.raises(ValueError, match="nested too deeply"):
        rollout(metadata=nested(33))


def test_columns_are_those_that_the_fields_declare():
    columns = columns_of(JoinedGroup)
    assert columns.keys() > columns_of(ScoredGroup).keys()
    assert columns["policy_logprobs"] == Column(
        "sampled", "<f4", source="logprobs", form="logprobs"
    )
    assert "uids" not in columns and "prompt" not in columns


def test_an_array_of_another_length_or_type_is_named():
    check_floats("turn logprobs", floats(-1, -2), 2)
    with pytest.raises(ValueError, match=r"^turn logprobs has shape \[2\], expected \[3\]$"):
        check_floats("turn logprobs", floats(-1, -2), 3)
    with pytest.raises(ValueError, match=r"^group: lengths has shape \[2\], expected \[1\]$"):
        check_lengths("group", group(sizes=(1, 2)), ("lengths",), 1)
    with pytest.raises(ValueError, match="^experts must be uint8 or uint16, not int64$"):
        check_experts("experts", np.zeros((2, 1, 1), np.int64), 2)
    with pytest.raises(ValueError, match=r"^experts has shape \[2\], expected \[2, layers"):
        check_experts("experts", np.zeros(2, np.uint8), 2)
    for shape in ((2, 2**40, 0), (0, 64, 65)):
        with pytest.raises(ValueError, match="experts for each token, not 1 to 4,096$"):
            check_experts("experts", np.zeros(shape, np.uint8), shape[0])


@pytest.mark.parametrize(
    ("lengths", "wrong"),
    [
        ([2**62, 2**62, 2**62, 2**62 + 12], "one is 4611686018427387904, not 0 to 2147483647"),
        ([5, -1], "one is -1, not 0 to 2147483647"),
        ([2**31], "one is 2147483648, not 0 to 2147483647"),
    ],
)
def test_lengths_whose_sum_wraps_are_refused_one_by_one(lengths: list[int], wrong: str):
    with pytest.raises(ValueError, match=f"^lengths: {wrong}$"):
        total_of("lengths", np.array(lengths, np.int64))


def test_the_largest_lengths_are_added_up():
    assert total_of("lengths", np.full(2, 2**31 - 1, np.int32)) == 2**32 - 2
    assert total_of("lengths", np.zeros(0, np.int32)) == 0
