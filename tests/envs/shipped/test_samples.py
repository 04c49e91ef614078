"""Files of problems, good and bad, in both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.envs.shipped.samples import Columns, Sample, read

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=?", "gt_answer": "2", "level": 1},
    {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2=?"}],
        "gt_answer": 4,
        "level": 2,
    },
]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def test_prompts_and_messages(tmp_path: Path):
    found = read(jsonl(tmp_path / "a.jsonl", ROWS[0], "", ROWS[1]), Columns(keep=("level",)))
    assert found == [
        Sample(1, [{"role": "user", "content": "1+1=?"}], [], "2", {"level": 1}),
        Sample(3, ROWS[1]["prompt"], [], "4", {"level": 2}),  # an empty line counts
    ]


def test_token_ids_and_other_names(tmp_path: Path):
    rows = [
        {"input_token_ids": [1, 5, 2], "gt_answer": "x"},
        {"q": "say", "input_token_ids": [1], "gt_answer": 0.5},
    ]
    assert [
        (s.tokens, s.messages, s.answer)
        for s in read(jsonl(tmp_path / "a.jsonl", *rows), Columns(prompt="q"))
    ] == [
        ([1, 5, 2], [], "x"),
        ([1], [{"role": "user", "content": "say"}], "0.5"),
    ]


def test_a_field_of_a_structure_is_named_with_a_dot(tmp_path: Path):
    row = {
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": "72", "style": "rule"},
        "a.b": "c",
    }
    columns = Columns(answer="reward_model.ground_truth", keep=("reward_model.style", "a.b"))
    (found,) = read(jsonl(tmp_path / "a.jsonl", row), columns)
    assert found.answer == "72" and found.kept == {"reward_model.style": "rule", "a.b": "c"}
    for name in ("reward_model.x", "prompt.role", "a.b.c"):
        with pytest.raises(ValueError, match=f"a.jsonl:1: no '{name}' to keep"):
            read(tmp_path / "a.jsonl", Columns(keep=(name,)), needs_answer=False)


@pytest.mark.parametrize(
    ("names", "keep", "says"),
    [
        ("prompt", (), "columns is 'prompt'; write it as {prompt: NAME"),
        ({"prompt": 5}, (), "columns is {'prompt': 5}"),
        ({}, "level", r"keep is 'level'; write it as a list: \[level\]"),
    ],
)
def test_what_names_no_columns_is_refused(names: Any, keep: Any, says: str):
    with pytest.raises(ValueError, match=says):
        Columns.named(names, keep)


def test_parquet_says_the_same(tmp_path: Path):
    rows = [
        {"prompt": "1+1=?", "gt_answer": "2", "input_token_ids": None},
        {"prompt": None, "gt_answer": "3", "input_token_ids": [4, 70_000]},
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", Columns()) == read(
        jsonl(tmp_path / "a.jsonl", *rows), Columns()
    )
    messages = [{"prompt": ROWS[1]["prompt"], "gt_answer": "4"}]
    pq.write_table(pa.Table.from_pylist(messages), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", Columns())[0].messages == ROWS[1]["prompt"]


SCHEMA = pa.schema(
    [("prompt", pa.string()), ("gt_answer", pa.string()), ("input_token_ids", pa.list_(pa.int64()))]
)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "a.jsonl:2: not JSON .Expecting property name"),
        ("[" * 100_000, "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: not a map of columns but list"),
        (
            {"question": "?", "answer": "!"},
            "a.jsonl:2: neither 'prompt' nor 'input_token_ids'; it has question, answer",
        ),
        ({"prompt": "?", "answer": "!"}, "a.jsonl:2: no 'gt_answer'; it has prompt, answer"),
        ({"prompt": "?", "gt_answer": None}, "a.jsonl:2: 'gt_answer' is null$"),
        ({"prompt": "?", "gt_answer": "NaN"}, "a.jsonl:2: 'gt_answer' is 'NaN', not an answer"),
        ({"prompt": "?", "gt_answer": " "}, "a.jsonl:2: 'gt_answer' is ' ', not an answer"),
        ({"prompt": "?", "gt_answer": ["2"]}, r"a.jsonl:2: 'gt_answer' is \['2'\], not an answer"),
        (
            {"prompt": "", "gt_answer": "2"},
            "a.jsonl:2: 'prompt' is neither a text nor a list of messages",
        ),
        (
            {"prompt": ["?"], "gt_answer": "2"},
            "a.jsonl:2: 'prompt' has a message without role and content: '\\?'",
        ),
        (
            {"input_token_ids": [], "gt_answer": "2"},
            "a.jsonl:2: token ids are a list of whole numbers, at least one, from 0",
        ),
        ({"input_token_ids": [1, -1], "gt_answer": "2"}, "a.jsonl:2: token ids"),
        ({"input_token_ids": [True], "gt_answer": "2"}, "a.jsonl:2: token ids"),
        ({"input_token_ids": "12", "gt_answer": "2"}, "a.jsonl:2: token ids"),
    ],
)
def test_a_bad_line_is_named(bad: Any, says: str, tmp_path: Path):
    with pytest.raises(ValueError, match=says):
        read(jsonl(tmp_path / "a.jsonl", ROWS[0], bad), Columns())


def test_so_are_the_others_and_how_many(tmp_path: Path):
    rows = [ROWS[0], *["{"] * 9]
    with pytest.raises(
        ValueError, match=r":2: not JSON \(.*\); lines 3, 4, 5, 6, 7 neither \(9 in all\)$"
    ):
        read(jsonl(tmp_path / "a.jsonl", *rows), Columns())
    with pytest.raises(ValueError, match=r":2: not JSON \(.*\); line 3 neither$"):
        read(jsonl(tmp_path / "a.jsonl", *rows[:3]), Columns())


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path: Path):
    rows = [
        {"prompt": "?", "gt_answer": "1", "input_token_ids": None},
        {"prompt": "?", "gt_answer": None, "input_token_ids": None},
    ]
    pq.write_table(
        pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "a.parquet", row_group_size=1
    )
    with pytest.raises(ValueError, match="a.parquet:2: 'gt_answer' is null$"):
        read(tmp_path / "a.parquet", Columns())


def test_what_is_kept_can_travel(tmp_path: Path):
    for row, says in (
        ({"x": [1]}, "'x' is list; only texts and numbers"),
        ({"x": float("nan")}, "'x' is nan"),
        ({}, "no 'x' to keep; it has prompt"),
    ):
        with pytest.raises(ValueError, match=says):
            read(jsonl(tmp_path / "a.jsonl", {**ROWS[0], **row}), Columns(keep=("x",)))


def test_a_file_that_is_none_is_named(tmp_path: Path):
    (tmp_path / "a.parquet").write_text("PAR1")
    (tmp_path / "b.jsonl").write_text("\n")
    for name, says in (
        ("a.parquet", "a.parquet is no Parquet"),
        ("b.jsonl", "b.jsonl has no problems"),
        ("c.jsonl", "c.jsonl cannot be read .No such file"),
        ("c.parquet", "c.parquet cannot be read"),
        ("a.xlsx", "a.xlsx: name it .jsonl, .json, .csv, .tsv or .parquet, by what is in it"),
    ):
        with pytest.raises(ValueError, match=says):
            read(tmp_path / name, Columns())


def test_without_a_judge_no_answer_is_needed(tmp_path: Path):
    assert (
        read(jsonl(tmp_path / "a.jsonl", {"prompt": "?"}), Columns(), needs_answer=False)[0].answer
        == ""
    )
