from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.extensions.recordings.output_directory import new_directory
from streamrl.system.errors import ExportError


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_appears_when_it_is_complete(tmp_path: Path, exists: bool):
    """An empty one may be there; what a killed process has left is removed."""
    directory = tmp_path / "a" / "b"
    if exists:
        directory.mkdir(parents=True)
    leftover = tmp_path / "a" / ".b.part" / "old"
    leftover.mkdir(parents=True)
    with new_directory(directory) as temporary:
        (temporary / "file").write_text("x")
        assert not (directory / "file").exists()
    assert [path.name for path in directory.iterdir()] == ["file"]
    assert [path.name for path in directory.parent.iterdir()] == ["b"]


def test_nothing_is_left_of_a_failure(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "a") as temporary:
        (temporary / "file").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_file", [False, True])
def test_what_exists_is_not_written_over(tmp_path: Path, is_file: bool):
    taken = tmp_path / "a"
    if not is_file:
        taken.mkdir()
    (taken if is_file else taken / "file").write_text("x")
    with (
        pytest.raises(ExportError, match="a exists and is not an empty directory; give another"),
        new_directory(taken),
    ):
        pass
