from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.extensions.dashboard.tokens import texts, texts_of

PIECES = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"<s>", 4: b"\n"}


class Bytes:
    """A tokenizer whose tokens are bytes, as byte-level BPE has them."""

    def id_to_token(self, id: int) -> str | None:
        return str(id) if id in PIECES else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return b"".join(PIECES[id] for id in ids).decode("utf-8", "replace")


def test_a_character_of_two_tokens_stands_at_the_first():
    assert texts(Bytes(), [0, 1, 2, 3, 4]) == ["a", "é", "", "<s>", "\n"]


def test_half_a_character_stays_broken():
    assert texts(Bytes(), [1, 0]) == ["�", "a"] and texts(Bytes(), [0, 1]) == ["a", "�"]


def test_an_id_outside_the_vocabulary_is_shown():
    assert texts(Bytes(), [0, 99, 0]) == ["a", "[99]", "a"]


def test_the_runs_tokenizer_and_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from tokenizers import Tokenizer, models

    run = run_file.parse({"run": "r", "runs_dir": str(tmp_path), "envs": {"copy": {}}})
    assert texts_of(run) is None
    (run.directory / "model").mkdir(parents=True)
    file = run.directory / "model" / "tokenizer.json"
    Tokenizer(models.WordLevel({"one": 0, "▁two": 1}, unk_token="one")).save(str(file))
    made = texts_of(run)
    assert made is not None and made([0, 1]) == ["one", " ▁two"]
    file.write_text("no tokenizer")
    assert texts_of(run) is None and "tokens are shown as ids" in caplog.text
