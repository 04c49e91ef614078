from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from streamrl.learner.files import checkpoints
from streamrl.learner.files.checkpoint_copies import CheckpointCopies
from streamrl.learner.files.checkpoints import POSITION, TrainingPosition
from streamrl.system.errors import CheckpointError


@pytest.fixture(params=["file", "memory"])
def copies(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointCopies:
    fsspec.filesystem("memory").store.clear()
    uri = f"file://{tmp_path}/some where" if request.param == "file" else "memory://bucket/copies"
    return CheckpointCopies(f"{uri}/run/checkpoints/lead/")


def made(directory: Path, *versions: int) -> Path:
    for version in versions:
        path = checkpoints.path_of(directory, version)
        (path / "d").mkdir(parents=True)
        (path / "d" / "weights").write_bytes(bytes([version]))
        position = TrainingPosition(version, 10 * version, f"s{version}")
        (path / POSITION).write_text(json.dumps(position._asdict()))
    return directory


def test_a_learner_on_another_disk_goes_on_from_the_newest_copy(
    copies: CheckpointCopies, tmp_path: Path
):
    here = made(tmp_path / "here", 1, 2, 3)
    assert copies.versions() == []
    copies.fetch_newest(tmp_path / "there", 5)  # there are none
    for version in (1, 2, 3):
        copies.put(here, version, keep=2)
    assert copies.versions() == [2, 3]
    there = tmp_path / "there"
    copies.fetch_newest(there, announced=2)
    assert checkpoints.latest(there, 5) == TrainingPosition(2, 20, "s2")
    copies.fetch_newest(there, announced=5)
    assert checkpoints.versions(there) == [2, 3]
    assert (checkpoints.path_of(there, 3) / "d" / "weights").read_bytes() == b"\x03"


def test_a_learner_that_has_as_new_a_checkpoint_fetches_none(
    copies: CheckpointCopies, tmp_path: Path
):
    copies.put(made(tmp_path / "here", 2), 2, keep=2)
    there = made(tmp_path / "there", 2)
    (checkpoints.path_of(there, 2) / "d" / "weights").write_bytes(b"its own")
    copies.fetch_newest(there, announced=5)
    assert (checkpoints.path_of(there, 2) / "d" / "weights").read_bytes() == b"its own"


def test_half_a_copy_is_none_and_is_written_anew(copies: CheckpointCopies, tmp_path: Path):
    here = made(tmp_path / "here", 1, 2)
    for version in (1, 2):
        copies.put(here, version, keep=2)
    files, root = copies._open()
    files.rm_file(f"{root}/000002/{POSITION}")  # as after a crash before the last of its files
    assert copies.versions() == [1]
    path = checkpoints.path_of(here, 2)
    shutil.rmtree(path / "d")
    (path / "other").write_text("x")
    copies.put(here, 2, keep=2)
    copies.fetch_newest(tmp_path / "there", 2)
    fetched = checkpoints.path_of(tmp_path / "there", 2)
    assert sorted(name.name for name in fetched.iterdir()) == ["other", POSITION]


class Killed(BaseException): ...


@pytest.mark.parametrize("files", [0, 1])
def test_what_a_killed_process_copied_is_taken_up_again(
    files: int, copies: CheckpointCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed before its first file, and before its last. The next checkpoint removes the half."""
    here = made(tmp_path / "here", 1, 2, 3)
    kind = type(copies._open()[0])
    put_file = kind.put_file
    copied = list[str]()

    def until_killed(self: Any, source: str, target: str, **options: Any) -> None:
        if len(copied) == files:
            raise Killed
        copied.append(target)
        put_file(self, source, target, **options)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(kind, "put_file", until_killed)
        copies.put(here, 1, keep=1)
    assert copies.versions() == []
    copies.put(here, 1, keep=1)
    assert copies.versions() == [1]
    with monkeypatch.context() as patched, pytest.raises(Killed):
        copied.clear()
        patched.setattr(kind, "put_file", until_killed)
        copies.put(here, 2, keep=1)
    copies.put(here, 3, keep=1)
    opened, root = copies._open()
    assert [path.rpartition("/")[2] for path in opened.ls(root, detail=False)] == ["000003"]
    with monkeypatch.context() as patched:
        patched.setattr(kind, "put_file", None)
        copies.put(here, 3, keep=1)  # nothing is copied twice


def test_copies_of_later_versions_stay(copies: CheckpointCopies, tmp_path: Path):
    """A process that was taken for dead may copy an old checkpoint late."""
    here = made(tmp_path / "here", 1, 4, 5)
    for version in (4, 5, 1):
        copies.put(here, version, keep=1)
    assert copies.versions() == [1, 5]


def test_what_a_file_system_raises_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    copies = CheckpointCopies(f"file://{tmp_path}/file")
    with pytest.raises(CheckpointError, match="checkpoint_copies: .*file cannot take version 1 "):
        copies.put(made(tmp_path / "here", 1), 1, keep=1)
    with pytest.raises(CheckpointError, match="checkpoint_copies: nowhere://x cannot be listed"):
        CheckpointCopies("nowhere://x").fetch_newest(tmp_path, 1)
