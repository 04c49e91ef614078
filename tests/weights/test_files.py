"""Files of a version, on this machine and in a store of another one."""

from __future__ import annotations

import hashlib
import io
import threading
from pathlib import Path

import pytest

from streamrl.system.errors import WeightError
from streamrl.weights.files import (
    as_weight_error,
    describe,
    differences_at,
    digest,
    open_store,
    parallel_map,
    read_manifest,
    verify,
)
from streamrl.weights.manifest import MANIFEST, Manifest, WeightFile, to_bytes
from streamrl.weights.store import Store
from tests.support.waiting import patience
from tests.weights.test_manifest import ABC
from tests.weights.test_store import WEIGHTS, write


def test_the_files_that_are_there_are_hashed_and_copied(root: str, tmp_path: Path):
    stored = write(Store(root), 1)
    fs, path = open_store(stored.uri)
    manifest = read_manifest(fs, path)
    (tmp_path / "copy").mkdir()
    assert differences_at(fs, path, manifest, tmp_path / "copy") == []
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in WEIGHTS} == WEIGHTS
    assert describe(tmp_path / "copy") == manifest
    fs.rm(f"{path}/config.json")
    assert differences_at(fs, path, manifest) == ["config.json is missing"]
    with pytest.raises(WeightError, match="^v1 is not what was announced: config.json is missing$"):
        verify(fs, path, manifest, "v1")


def test_an_incomplete_version_is_said(root: str):
    fs, path = open_store(f"{root}/v000007")
    with pytest.raises(WeightError, match=r"v000007/manifest.json does not exist: the version is"):
        read_manifest(fs, path)


def test_every_error_but_a_full_disk_is_a_weight_error():
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(WeightError, match="^it cannot be listed: RuntimeError: away$"):
        as_weight_error(lambda: fail(RuntimeError("away")), "it cannot be listed")
    with pytest.raises(OSError, match="No space left"):
        as_weight_error(lambda: fail(OSError(28, "No space left")), "it")


def test_a_directory_is_described_by_its_files(tmp_path: Path):
    (tmp_path / "b").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / MANIFEST).write_bytes(b"an earlier one does not count")
    empty = WeightFile("a", 0, hashlib.sha256().hexdigest())
    assert describe(tmp_path) == Manifest((empty, WeightFile("b", 3, ABC)))
    assert describe(tmp_path).size_bytes == 3


def test_the_same_files_give_the_same_bytes(tmp_path: Path):
    for directory, order in ((tmp_path / "one", "ab"), (tmp_path / "two", "ba")):
        directory.mkdir()
        for name in order:
            (directory / name).write_bytes(name.encode())
    one = describe(tmp_path / "one")
    two = describe(tmp_path / "two")
    assert (
        to_bytes(one) == to_bytes(two)
        and one.sha256 == two.sha256 == hashlib.sha256(to_bytes(one)).hexdigest()
    )


def test_when_one_fails_the_others_have_ended():
    done = list[int]()
    failed = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            failed.set()
            raise OSError("the first")
        assert failed.wait(patience(60))
        done.append(item)
        return item

    with pytest.raises(OSError, match="^the first$"):
        parallel_map(work, range(9))
    assert sorted(done) == list(range(1, 9)) and parallel_map(work, range(1, 4)) == [1, 2, 3]


def test_a_digest_copies_what_it_reads():
    data = bytes(range(256)) * 10_000  # more than a chunk
    copy = io.BytesIO()
    assert digest(io.BytesIO(data), copy) == (len(data), hashlib.sha256(data).hexdigest())
    assert copy.getvalue() == data
