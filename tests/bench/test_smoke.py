"""The guard: slower than it was is said after a second look, and not before."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import smoke


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Runs it with these measured one after the other, where a ratio of 0.5 is recorded."""

    def run(*found: float | SystemExit) -> None:
        recorded = tmp_path / "smoke.json"
        coming = iter(found)
        recorded.write_text(json.dumps({"ratio_to_raw": 0.5}))
        monkeypatch.setattr(smoke, "RECORDED", recorded)
        monkeypatch.setattr(smoke, "measure", lambda: measured(coming))
        monkeypatch.setattr("sys.argv", ["bench.smoke"])
        smoke.main()
        assert list(coming) == []

    return run


def measured(coming: Iterator[float | SystemExit]) -> float:
    found = next(coming)
    if isinstance(found, SystemExit):
        raise found
    return found


def test_six_tenths_of_what_is_recorded_is_enough(guard: Callable[..., None]):
    guard(0.31)


@pytest.mark.parametrize("first", [0.29, SystemExit("bench: buffer ended with 75")])
def test_it_looks_twice(guard: Callable[..., None], first: float | SystemExit):
    guard(first, 0.31)
    with pytest.raises(SystemExit, match=r"has become slower: twice not 0\.30 of plain Kafka"):
        guard(first, 0.29)
