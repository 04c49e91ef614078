from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bench.memory import SPARE_BYTES, fill_page_cache


@pytest.mark.parametrize(
    ("free", "read"),
    [
        (SPARE_BYTES + 5_000_000, 5_000_000),
        (SPARE_BYTES + 9_000_000, 8_000_000),
        (SPARE_BYTES - 1, 0),
    ],
)
def test_what_is_free_is_read_but_for_a_rest_and_no_more_than_a_bench_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, read: int
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(free=free))
    assert fill_page_cache(tmp_path, most_bytes=8_000_000) == read
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == read


def test_a_second_time_it_reads_what_has_become_free_since(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(free=SPARE_BYTES + 1000))
    assert [fill_page_cache(tmp_path), fill_page_cache(tmp_path)] == [1000, 1000]
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [1000, 1000]
