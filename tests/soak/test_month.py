"""The month in small, and that it would find what grows."""

from __future__ import annotations

from dataclasses import replace

from tests.soak.month import AT_ONCE, TENTHS, Tenth, grown, month


def test_nothing_grows_over_ten_restarts():
    tenths = list(month(3 * TENTHS * AT_ONCE, envs=4))
    assert sum(tenth.batches for tenth in tenths) == 3 * TENTHS * AT_ONCE
    assert grown(tenths, slower=10) == []  # of time only the month itself can judge


def test_what_grows_is_named():
    flat = [Tenth(100, 80.0, 900.0, 10_000, 500, True)] * 4
    assert grown(flat) == []
    found = grown([*flat, Tenth(100, 95.0, 1300.0, 14_000, 700, False)])
    assert [sentence.split(" grew")[0] for sentence in found[:4]] == [
        "memory",
        "batch_us",
        "journal_bytes",
        "snapshot_bytes",
    ]
    assert found[4:] == ["a part that was started again was not where it had been"]
    assert grown([replace(flat[0], rss_mib=60.0), *flat]) == []  # the first tenth may warm up
