import numpy as np
import pytest

from streamrl.batcher.packing import pack, row_shapes


def test_best_fit_puts_each_rollout_into_the_tightest_row():
    # 7 and 6 open rows 0 and 1 (free 3 and 4); 4 fits row 1 exactly, 3 row 0
    rows = pack(np.array([3, 7, 4, 6]), max_seq_len=10, row_count=2)
    assert rows is not None and rows.tolist() == [0, 0, 1, 1]


def test_what_does_not_fit_gives_none():
    assert pack(np.array([6, 6, 6]), max_seq_len=10, row_count=2) is None


def test_a_rollout_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match="rollout 1 has 11 tokens; a row holds 10"):
        pack(np.array([3, 11]), max_seq_len=10, row_count=2)


def test_no_row_overflows_and_no_rollout_is_lost():
    lengths = np.random.default_rng(0).integers(1, 65, 500)
    rows = pack(lengths, 64, 300)
    assert rows is not None and np.bincount(rows, weights=lengths).max() <= 64 and len(rows) == 500


def test_shorter_rows_are_as_many_as_hold_as_many_tokens() -> None:
    assert row_shapes(3, 10, []) == [(3, 10)]
    assert row_shapes(3, 10, [5, 4]) == [(8, 4), (6, 5), (3, 10)]
    assert row_shapes(4, 10, [4], processes=4) == [(12, 4), (4, 10)]
