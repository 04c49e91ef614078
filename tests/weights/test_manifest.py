from __future__ import annotations

import hashlib
import io
import threading
from pathlib import Path

import pytest

from streamrl.errors import WeightError
from streamrl.weights.manifest import (
    MANIFEST,
    Manifest,
    WeightFile,
    describe,
    differences,
    digest,
    from_bytes,
    is_plain_filename,
    parallel_map,
    to_bytes,
)
from tests.support.waiting import patience

# SHA-256 of "abc", FIPS 180-2
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


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


def test_bytes_to_manifest_and_back():
    manifest = Manifest((WeightFile("model.safetensors", 3, ABC),))
    assert from_bytes(to_bytes(manifest), "here") == manifest


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0", MANIFEST]
)
def test_a_name_that_leaves_the_directory_is_refused(name: str):
    assert not is_plain_filename(name)
    with pytest.raises(WeightError, match="not a plain file name"):
        from_bytes(to_bytes(Manifest((WeightFile(name, 1, ABC),))), "here")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"files": 3}', b'{"files": [{"name": "a"}]}', b"\xff\xfe", b"null"],
)
def test_what_is_no_manifest_is_refused(data: bytes):
    with pytest.raises(WeightError, match="here is not a manifest"):
        from_bytes(data, "here")


def test_differences_name_the_file_and_both_hashes():
    expected = [WeightFile("a", 1, "aa"), WeightFile("b", 2, "bb"), WeightFile("c", 3, "cc")]
    found = [WeightFile("c", 3, "cc"), WeightFile("b", 1, "xx")]
    assert differences(expected, found) == [
        "a is missing",
        "b has 1 bytes with sha256 xx, announced are 2 bytes with sha256 bb",
    ]
    assert differences(expected, expected) == []


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
