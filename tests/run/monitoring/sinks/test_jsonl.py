from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.run.monitoring.sinks import jsonl
from streamrl.run.monitoring.sinks.jsonl import JsonLines
from tests.run.monitoring.sinks import stories


def lines(path: Path) -> Iterator[dict[str, object]]:
    return (json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_jsonl_has_every_record_once(torn: int, tmp_path: Path):
    told = stories.entries(stories.records(range(5)))
    path = tmp_path / "digits" / "metrics.jsonl"
    for life in (told[:7], told, told):
        sink = JsonLines(stories.context(tmp_path))
        stories.tell(sink, life)
        sink.close()
        if torn and life is not told:
            path.write_bytes(path.read_bytes()[:-torn])
    found = list(lines(path))
    assert [line["offset"] for line in found] == [entry.offset for entry in told]
    assert [line["values"] for line in found] == [entry.metric.values for entry in told]
    assert (
        found[1]["source"] == "batcher" and found[1]["step"] == 0 and found[1]["time_s"] == 1_000.0
    )


@pytest.mark.parametrize(
    "before", ["", '{"source": "buffer", "time_s": 1.0, "values": {}}\n', '{"sour']
)
def test_jsonl_that_has_no_offsets_is_written_anew(before: str, tmp_path: Path):
    told = stories.entries(stories.records(range(2)))
    path = tmp_path / "digits" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text(before)
    sink = JsonLines(stories.context(tmp_path))
    stories.tell(sink, told)
    sink.close()
    assert [line["offset"] for line in lines(path)] == [entry.offset for entry in told]


@pytest.mark.parametrize("torn", [b"", b'{"offset": 12'])
def test_jsonl_is_kept_whatever_the_length_of_its_last_line(
    torn: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jsonl, "TAIL_BYTES", 10)
    path = tmp_path / "metrics.jsonl"
    whole = b'{"offset": 10}\n{"offset": 11, "values": {"' + b"n" * 1_000 + b'": 1.0}}\n'
    path.write_bytes(whole + torn)
    assert jsonl.mend(path) == 11
    assert path.read_bytes() == whole
