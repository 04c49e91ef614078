"""Files of rows in each format, as they come from other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.envs.shipped.row_files import columns_of, read_rows, rows

ROWS = [{"prompt": "1+1=?", "gt_answer": "2"}, {"prompt": "2+2=?", "gt_answer": "4"}]


def written(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


LINES = "\n".join(map(json.dumps, ROWS))
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
CSV = "prompt,gt_answer\n1+1=?,2\n2+2=?,4\n"


@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        ("a.jsonl", LINES, [1, 2]),
        ("a.jsonl", "\ufeff" + LINES, [1, 2]),
        ("a.ndjson", LINES.replace("\n", "\r\n\r\n"), [1, 3]),
        ("a.json", LINES, [1, 2]),
        ("a.json", "\ufeff \n" + json.dumps(ROWS, indent=2), [1, 2]),
        ("a.csv", CSV, [2, 3]),
        ("a.csv", "\ufeff" + CSV.replace("\n", "\r\n"), [2, 3]),
        ("a.csv", 'prompt,gt_answer\n"1+1=?",2\n\n"2+2=?","4"', [2, 4]),
        ("a.TSV", CSV.replace(",", "\t"), [2, 3]),
        ("A.JSONL", LINES, [1, 2]),
    ],
)
def test_the_rows_are_the_same_in_each_format(
    name: str, data: str, lines: list[int], tmp_path: Path
):
    found = [*rows(written(tmp_path / name, data))]
    assert [row for _, row in found] == ROWS
    assert [line for line, _ in found] == lines


def test_a_cell_of_several_lines_has_the_line_at_which_its_row_begins(tmp_path: Path):
    data = 'prompt,gt_answer\n"1+\n1=?",2\n2+2=?,\n'
    assert [*rows(written(tmp_path / "a.csv", data))] == [
        (2, {"prompt": "1+\n1=?", "gt_answer": "2"}),
        (4, {"prompt": "2+2=?", "gt_answer": None}),
    ]


def test_nulls_within_the_cells_of_a_parquet_file_are_left_out(tmp_path: Path):
    messages = [{"role": "user", "content": "?"}, {"role": "tool", "name": "f"}]
    pq.write_table(
        pa.Table.from_pylist([{"messages": messages, "n": None}]), tmp_path / "a.parquet"
    )
    assert [*rows(tmp_path / "a.parquet")] == [(1, {"messages": messages, "n": None})]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", '{"a": 1, "a": 2}', "a.jsonl:1: not JSON .'a' is there twice"),
        ("a.jsonl", '{"a": "\xe9"}'.encode("latin-1"), "a.jsonl:1: not UTF-8 .* byte 7"),
        ("a.jsonl", POINTER, "a.jsonl is a pointer of Git LFS"),
        ("a.csv", POINTER, "a.csv is a pointer of Git LFS"),
        ("a.parquet", POINTER, "a.parquet is a pointer of Git LFS"),
        ("a.jsonl", LINES.encode("utf-16"), "a.jsonl is UTF-16 or UTF-32; store it as UTF-8"),
        ("a.jsonl", '{"a": 1}\n[1]', "a.jsonl:2: not a map of columns but list"),
        ("a.json", "[{]", "a.json is not JSON"),
        ("a.json", "[1]", "a.json:1: not a map of columns but int"),
        ("a.csv", "a,b,a\n1,2,3", "a.csv: two columns have the name 'a'; rename one"),
        ("a.csv", "a,b\n1,2\n1,2,3", "a.csv:3: 3 cells, but 2 columns have names"),
        ("a.csv", "a,b\n1\n1,2", "a.csv:2: 1 cells, but 2 columns have names"),
        ("a.csv", 'a,b\n1,"2', "a.csv:2: not CSV"),
        ("a.csv", "a\n\xe9".encode("latin-1"), "a.csv is not UTF-8"),
        ("a.csv", "a,b\n", "a.csv has no rows"),
    ],
)
def test_a_file_or_line_that_cannot_be_read_is_named(
    name: str, data: str | bytes, says: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=says):
        read_rows(written(tmp_path / name, data), "rows", lambda line, row: columns_of(row))


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path: Path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="two columns have the name 'a'"):
        next(rows(tmp_path / "a.parquet"))


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_a_number_is_spelled_as_it_was_written_whatever_its_precision(
    kind: pa.DataType, tmp_path: Path
):
    pq.write_table(pa.table({"a": pa.array([0.1, None], kind)}), tmp_path / "a.parquet")
    assert [row for _, row in rows(tmp_path / "a.parquet")] == [{"a": 0.1}, {"a": None}]
