from __future__ import annotations

import stat
from pathlib import Path

import pytest

from streamrl.system.files import write_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path: Path):
    path = tmp_path / "notes.json"
    write_atomically(path, "old")
    before = path.open()
    write_atomically(path, "new")
    assert before.read() == "old" and path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["notes.json"]


def test_a_file_may_be_its_owners_alone(tmp_path: Path):
    path = tmp_path / "run.yaml"
    write_atomically(path, "run: mine", 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_cannot_be_written_leaves_the_file_that_was_there(tmp_path: Path):
    path = tmp_path / "notes.json"
    write_atomically(path, "old")
    (tmp_path / "notes.json.part").mkdir()
    with pytest.raises(OSError):
        write_atomically(path, "new")
    assert path.read_text() == "old"
