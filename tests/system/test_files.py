from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from streamrl.system.files import (
    remove_least_recently_used,
    shipped_directory,
    write_atomically,
)

ROOT = Path(__file__).parents[2]


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


def test_what_cannot_be_written_leaves_the_file_that_was_there_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "notes.json"
    write_atomically(path, "old")

    def disk_is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "write_text", disk_is_full)
    with pytest.raises(OSError):
        write_atomically(path, "new")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_what_comes_with_streamrl_is_found_in_the_sources():
    """tests/test_package.py finds it in a wheel."""
    for installed, source in (
        ("topic_templates", "topics"),
        ("run_templates", "deploy/templates"),
    ):
        assert shipped_directory(installed, source) == ROOT / source


def test_files_that_were_used_longest_ago_are_removed_first(tmp_path: Path):
    for name, read_s, written_s in (("read", 9, 1), ("written", 2, 8), ("old", 3, 4)):
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (read_s, written_s))
    remove_least_recently_used(tmp_path, 30)
    assert len(list(tmp_path.iterdir())) == 3
    remove_least_recently_used(tmp_path, 29)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["read", "written"]


def test_of_a_directory_that_is_not_there_nothing_is_removed(tmp_path: Path):
    remove_least_recently_used(tmp_path / "none", 0)
