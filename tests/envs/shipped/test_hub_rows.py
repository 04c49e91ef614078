"""Data sets of a hub on loopback: downloaded once, read from the cache without a network, and posed
as problems.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from streamrl.envs.catalog import make_env
from streamrl.envs.shipped.hub_rows import hub_rows
from streamrl.system.errors import ConfigError
from tests.support.hub import Hub, serving_hub, use_hub

ROOT = Path(__file__).parents[3]
NAME = "openai/gsm8k"
TRAIN = [
    {"question": "48 and half of it?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
    {"question": "A thousand and 1?", "answer": "#### 1,001"},
]
TEST = [{"question": "2+2?", "answer": "#### 4"}]
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.parquet}
  - {split: test, path: main/test.parquet}
- config_name: socratic
  data_files: [{split: train, path: socratic/train.parquet}]
---
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), data)
    return data.getvalue()


FILES = {
    "README.md": CARD.encode(),
    "main/train.parquet": parquet(TRAIN),
    "main/test.parquet": parquet(TEST),
    "socratic/train.parquet": parquet(TEST),
    "gsm8k.py": b"raise SystemExit('code of a data set ran')",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving_hub() as hub:
        use_hub(monkeypatch, hub.url, str(tmp_path / "cache"))
        yield hub


def test_the_rows_of_a_split(hub: Hub):
    hub.dataset(NAME, FILES)
    assert [*hub_rows(NAME, "main", "train")] == [(1, TRAIN[0]), (2, TRAIN[1])]
    assert [*hub_rows(NAME, "main", "test")] == [(1, TEST[0])]
    assert [*hub_rows(NAME, "socratic", "train")] == [(1, TEST[0])]


def test_a_commit_that_is_in_the_cache_is_read_without_the_hub(hub: Hub):
    commit = hub.dataset(NAME, FILES)
    assert len([*hub_rows(NAME, "main", "train")]) == 2
    hub.dataset(NAME, {**FILES, "main/train.parquet": parquet(TEST)})
    hub.requests.clear()
    assert len([*hub_rows(f"{NAME}@{commit}", "main", "train")]) == 2
    assert not hub.requests
    assert len([*hub_rows(NAME, "main", "train")]) == 1  # the newest commit


@pytest.mark.parametrize(
    ("name", "subset", "split", "says"),
    [
        ("gsm8k", "", "train", "hub: 'gsm8k' is not the name of a data set; write OWNER/NAME"),
        (NAME, "", "train", f"{NAME}  train: .*main.*socratic"),
        (NAME, "mian", "train", f"{NAME} mian train: .*mian"),
        (NAME, "main", "dev", f"{NAME} main dev: .*train.*test"),
    ],
)
def test_what_the_data_set_does_not_have_is_named(
    hub: Hub, name: str, subset: str, split: str, says: str
):
    hub.dataset(NAME, FILES)
    with pytest.raises(ValueError, match=says):
        [*hub_rows(name, subset, split)]


def test_gsm8k_is_posed_by_its_template(hub: Hub):
    hub.dataset(NAME, FILES)
    params = {"hub": NAME, "subset": "main", "template": "gsm8k"}
    env: Any = make_env("dataset", 0, params, "envs.x")
    posed = {env.problem(number).answer: env.problem(number) for number in range(2)}
    assert {*posed} == {"72", "1,001"}
    assert posed["72"].messages[0]["content"].startswith("48 and half of it?\nThink step by step")
    assert posed["72"].metadata == {"line": 1, "epoch": 0}


def test_the_run_file_that_is_shipped_for_gsm8k_poses_its_problems(hub: Hub):
    hub.dataset(NAME, FILES)
    run = yaml.safe_load((ROOT / "deploy" / "templates" / "gsm8k" / "run.yaml").read_text())
    env: Any = make_env("dataset", 0, run["envs"]["gsm8k"]["params"], "envs.gsm8k")
    assert {env.problem(number).answer for number in range(2)} == {"72", "1,001"}


def test_columns_and_instruction_of_the_run_file_come_before_those_of_the_template(hub: Hub):
    rows = [{"q": "1+1?", "solution": r"So \boxed{2}."}]
    hub.dataset("some/maths", {"train.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    params = {
        "hub": "some/maths",
        "template": "boxed",
        "columns": {"prompt": "q"},
        "instruction": "",
        "reward": "exact",
    }
    problem = make_env("dataset", 0, params, "envs.x").problem(0)
    assert problem.answer == "2" and problem.messages == [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "a dataset has a file, or the name of a data set on the hub"),
        ({"hub": NAME, "file": "a.jsonl"}, "a dataset has a file, or the name"),
        ({"file": "a.jsonl", "split": "train"}, "subset and split are those of a data set"),
        ({"hub": NAME, "template": "gsm8"}, r"no template 'gsm8'; did you mean 'gsm8k'\?"),
        ({"hub": NAME, "subset": "main"}, f"{NAME} main train:1: neither 'prompt' nor"),
        ({"hub": "no/such"}, "no such dataset on"),
        (
            {"hub": NAME, "subset": "main", "template": "boxed", "columns": {"prompt": "question"}},
            f"{NAME} main train:1: no 'solution'; it has question, answer; line 2 neither",
        ),
        (
            {
                "hub": NAME,
                "subset": "main",
                "template": "boxed",
                "columns": {"prompt": "question", "answer": "answer"},
            },
            f"{NAME} main train:1: the solution has no answer in a box; line 2 neither",
        ),
    ],
)
def test_params_that_make_no_data_set_are_refused(hub: Hub, params: dict[str, Any], says: str):
    hub.dataset(NAME, FILES)
    with pytest.raises(ConfigError, match=says):
        make_env("dataset", 0, params, "envs.x")
