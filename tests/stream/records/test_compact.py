import numpy as np
import pytest

from streamrl.stream.log.codec import pack_array, unpack_array
from streamrl.stream.records.compact import (
    THREE_BYTES,
    compact_ids,
    compact_logprobs,
    join_ids,
    join_logprobs,
    wide_ids,
    wide_logprobs,
)
from tests.support.build import floats


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


@pytest.mark.parametrize(
    ("values", "size"),
    [([], 2), ([0, 65_535], 2), ([65_536], 3), ([1, 2**24 - 1, 70_000], 3), ([2**24], 4)],
)
def test_ids_take_as_many_bytes_as_the_largest_needs(values: list[int], size: int):
    compact = compact_ids(ids(*values))
    assert compact.itemsize == size and wide_ids(compact).tolist() == values
    assert compact_ids(compact) is compact
    travelled = unpack_array(memoryview(pack_array(compact)))
    assert wide_ids(travelled).tolist() == values and wide_ids(travelled[1:]).tolist() == values[1:]


def test_three_bytes_are_little_endian():
    assert compact_ids(ids(0x010203, 0x0A)).tobytes() == bytes([3, 2, 1, 10, 0, 0])


def test_joined_ids_are_as_wide_as_the_widest():
    three = compact_ids(ids(70_000))
    assert join_ids([three, three]).dtype == THREE_BYTES
    two = np.array([5], np.uint16)
    joined = join_ids([two, three, ids(6), np.zeros(0, np.uint16)])
    assert joined.dtype == THREE_BYTES and wide_ids(joined).tolist() == [5, 70_000, 6]
    assert join_ids([ids(5), ids(6)]).dtype == np.uint16  # a producer may write four bytes
    assert join_ids([two[:0], three[:0]]).tolist() == []


def test_a_logprob_is_rounded_to_the_nearest_step_once():
    given = np.append(-np.random.default_rng(0).exponential(2, 1000), [0, -1e-9]).astype(np.float32)
    compact = compact_logprobs(given)
    rounded = wide_logprobs(compact)
    assert compact.dtype == np.uint16 and rounded.dtype == np.float32
    assert np.abs(rounded - given).max() <= 1 / 4096
    assert compact_logprobs(compact) is compact
    np.testing.assert_array_equal(compact_logprobs(rounded), compact)


@pytest.mark.parametrize("value", [-32.0, -1000.0, 0.5, np.nan, np.inf, -np.inf])
def test_logprobs_that_16_bits_do_not_hold_stay_as_they_are(value: float):
    given = floats(-1, value)
    assert compact_logprobs(given) is given


def test_what_is_0_but_for_rounding_is_0():
    assert compact_logprobs(floats(1e-3, 1e-7)).tolist() == [0, 0]


def test_joined_logprobs_are_exact():
    given = floats(-40, -0.3)
    compact = compact_logprobs(floats(-0.25))
    assert join_logprobs([compact, compact]).dtype == np.uint16
    assert join_logprobs([given, compact]).tolist() == [*given.tolist(), -0.25]
