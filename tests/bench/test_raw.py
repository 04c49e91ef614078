"""The ceiling hands on the bytes that came, as many as ours had."""

from bench.raw import together


def test_a_group_is_a_share_of_each_of_its_rollouts():
    assert together([b"abcd", b"efgh", b"ijkl"], 6) == b"abefij"


def test_what_the_shares_leave_is_filled():
    assert together([b"abcd", b"efgh"], 5) == b"abef\0"
    assert together([b"ab", b"cd"], 6) == b"abcd\0\0"
