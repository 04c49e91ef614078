"""What is done beside a test is done, and its failure is the test's."""

from __future__ import annotations

import pytest

from tests.support.beats import repeating


def test_it_is_done_at_least_once_however_short_the_block_is():
    done = list[int]()
    with repeating(lambda: done.append(1), 60.0):
        pass
    assert done == [1]


def test_what_it_raises_is_raised_after_the_block():
    def fail() -> None:
        raise OSError("no such thing")

    with pytest.raises(OSError, match="no such thing"), repeating(fail, 60.0):
        pass


def test_the_block_is_what_has_failed_where_both_have():
    def fail() -> None:
        raise OSError("no such thing")

    with pytest.raises(KeyError), repeating(fail, 60.0):
        raise KeyError("first")
