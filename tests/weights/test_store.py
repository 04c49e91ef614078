from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import WeightError
from streamrl.weights.manifest import (
    WeightRef,
)
from streamrl.weights.pull import pull
from streamrl.weights.store import Store, pinned_for_eval

WEIGHTS = {"model.safetensors": b"weights" * 1000, "config.json": b"{}"}
SIZE = 7002


class Cramped(MemoryFileSystem):
    """A remote store that is full after the first file, and leaves half of the second."""

    protocol = "cramped"

    def put_file(self, lpath: Any, rpath: str, **kwargs: Any) -> None:
        if rpath.endswith("model.safetensors"):
            self.pipe_file(rpath, b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().put_file(lpath, rpath, **kwargs)


fsspec.register_implementation("cramped", Cramped, clobber=True)


def write(store: Store, version: int, files: dict[str, bytes] = WEIGHTS) -> WeightRef:
    def into(directory: Path) -> None:
        for name, data in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(data)

    return store.put(version, into, SIZE)


def path_of(stored: WeightRef) -> Path:
    """Its directory, in a store of this machine."""
    return Path(stored.uri.removeprefix("file://"))


def mine_alone(store: Store) -> WeightRef:
    """Version 1, of files that this user alone may write to, whatever it gives others by
    default.
    """
    stored = write(store, 1)
    for path in path_of(stored).iterdir():
        path.chmod(0o644)
    return stored


def announced(stored: WeightRef, version: int = 1) -> PolicyVersion:
    return PolicyVersion(learner="lead", version=version, **stored._asdict())


def files_below(root: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(root)
    return sorted(name[len(path) :].lstrip("/") for name in fs.find(path))


def test_the_same_files_give_the_same_claim(root: str):
    first = write(Store(f"{root}/lead"), 1)
    assert write(Store(f"{root}/other"), 1)[1:] == first[1:]
    assert (
        write(Store(f"{root}/other"), 2, {**WEIGHTS, "config.json": b"[]"}).sha256 != first.sha256
    )


def test_two_results_of_a_version_lie_beside_each_other(root: str, tmp_path: Path):
    """What another process of the same learner announced stays as it is."""
    store = Store(root)
    first = write(store, 1, {"config.json": b"[1]"})
    second = write(Store(root), 1)
    assert first.uri != second.uri and store.versions() == [1]
    assert (
        pull(announced(first), root, tmp_path / "first").joinpath("config.json").read_bytes()
        == b"[1]"
    )
    assert (
        pull(announced(second), root, tmp_path / "second").joinpath("config.json").read_bytes()
        == b"{}"
    )
    store.prune(newest=9, keep=1)
    assert files_below(root) == []


def test_the_same_result_is_written_once_and_again_where_it_is_damaged(root: str):
    store = Store(root)
    stored = write(store, 1)
    fs, path = fsspec.core.url_to_fs(stored.uri)
    assert write(store, 1) == stored and store.holds(announced(stored))
    fs.pipe_file(f"{path}/config.json", b"[]")
    assert not store.holds(announced(stored))
    assert write(store, 1) == stored and store.holds(announced(stored))
    fs.rm(path, recursive=True)
    assert not store.holds(announced(stored)) and not store.holds(
        announced(stored._replace(uri=f"{root}/v000009"))
    )


def test_a_failure_leaves_nothing(root: str):
    store = Store(root)

    def half(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put(1, half)
    assert files_below(root) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path):
    left = tmp_path / ".tmp-v000001-1-ab"
    store = Store(f"file://{tmp_path}")
    left.mkdir()
    (left / "half").write_bytes(b"x")
    stored = write(store, 1)
    assert left.exists()  # of another process, for all that a writer knows
    store.clear()
    assert not left.exists() and store.holds(announced(stored))


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path):
    store = Store(f"file://{tmp_path}/store")

    def fill(directory: Path) -> None:
        (directory / "config.json").write_bytes(b"{}")
        # a real write that fails as on a full disk
        (directory / "model.safetensors").symlink_to("/dev/full")
        with (directory / "model.safetensors").open("wb") as full:
            full.write(WEIGHTS["model.safetensors"])

    full = (
        rf"weight store file://{tmp_path}/store is full: v000007 needs about 7002 bytes, \d+ are"
        r" free; free some"
    )
    with pytest.raises(WeightError, match=full):
        store.put(7, fill, SIZE)
    assert list((tmp_path / "store").iterdir()) == []


def test_a_full_remote_store_is_said_and_leaves_nothing():
    store = Store("cramped://bucket/weights")
    with pytest.raises(
        WeightError,
        match=(
            "weight store cramped://bucket/weights is full: v000001 needs about 7002 bytes; free"
            " some"
        ),
    ):
        write(store, 1)
    assert files_below("cramped://bucket/weights") == []


def test_a_store_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(
        WeightError,
        match=(
            "v000001 could not be written to the weight store .*Not a directory; set weights.store"
        ),
    ):
        write(Store(f"file://{tmp_path}/file"), 1)


def test_an_unknown_kind_of_store_is_said():
    with pytest.raises(WeightError, match="weight store nowhere://x: .*any URI that fsspec knows"):
        Store("nowhere://x")


def test_pruning_keeps_the_newest_and_leaves_what_is_to_come(root: str):
    store = Store(root)
    for version in (0, 1, 2, 3, 4, 9):
        write(store, version)
    store.prune(newest=4, keep=2)
    # 9 is of an earlier run of that name, and will be written again
    assert store.versions() == [3, 4, 9]


def test_versions_that_others_wait_for_are_kept_as_long_again(tmp_path: Path):
    store = Store(f"file://{tmp_path}")
    for version in range(13):
        store.put(version, lambda directory: directory.joinpath("file").write_text("x"))
    store.prune(newest=12, keep=2, keep_also=pinned_for_eval(12, 2, 4))
    assert store.versions() == [8, 11, 12]
    store.prune(newest=12, keep=2)
    assert store.versions() == [11, 12]


class EndpointConnectionError(Exception):
    """As botocore's: no OSError."""


class Unreachable(MemoryFileSystem):
    """A remote store that is away."""

    protocol = "unreachable"
    away = False

    def _reach(self) -> None:
        if Unreachable.away:
            raise EndpointConnectionError("Could not connect to the endpoint URL")

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._reach()
        return super()._open(path, *arguments, **options)

    def ls(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._reach()
        return super().ls(path, *arguments, **options)

    def exists(self, path: str, **options: Any) -> bool:
        self._reach()
        return super().exists(path, **options)


fsspec.register_implementation("unreachable", Unreachable, clobber=True)


def test_whatever_a_store_raises_is_a_weight_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = "unreachable://bucket/weights"
    there = Store(root)
    stored = write(there, 1)
    monkeypatch.setattr(Unreachable, "away", True)
    for ask in (
        lambda: pull(announced(stored), root, tmp_path / "copy"),
        lambda: write(there, 2),
        there.versions,
        lambda: there.prune(9, 1),
        lambda: there.holds(announced(stored)),
    ):
        with pytest.raises(WeightError, match="Could not connect to the endpoint URL"):
            ask()
    there.clear()  # best effort
    monkeypatch.setattr(Unreachable, "away", False)
    assert there.versions() == [1]
