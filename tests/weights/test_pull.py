"""What is pulled from a store is what was announced, or an error."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest

from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import WeightError
from streamrl.weights import files as file_system
from streamrl.weights.files import check_inside_store, describe, hash_file
from streamrl.weights.manifest import MANIFEST, Manifest, differences, to_bytes
from streamrl.weights.pull import pull
from streamrl.weights.store import Store
from tests.weights.test_store import SIZE, WEIGHTS, announced, mine_alone, path_of, write

TEMPLATE = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize("link", [False, True])
def test_what_is_written_can_be_pulled(root: str, link: bool, tmp_path: Path):
    stored = write(Store(f"{root}/lead"), 1)
    assert stored.uri == f"{root}/lead/v000001-{stored.sha256[:16]}" and stored.size_bytes == SIZE
    there = pull(announced(stored), root, tmp_path / "copy", link)
    assert (
        there == tmp_path / "copy"
        and {p.name: p.read_bytes() for p in there.iterdir() if p.name != MANIFEST} == WEIGHTS
    )
    assert describe(there).sha256 == stored.sha256


@pytest.mark.parametrize("link", [False, True])
def test_named_chat_templates_come_along(root: str, link: bool, tmp_path: Path):
    files = {**WEIGHTS, TEMPLATE: b"tools"}
    stored = write(Store(f"{root}/lead"), 1, files)
    there = pull(announced(stored), root, tmp_path / "copy", link)
    assert (there / TEMPLATE).read_bytes() == b"tools"
    assert describe(there).sha256 == stored.sha256
    assert Store(f"{root}/lead").holds(announced(stored))


def test_a_link_in_the_place_of_a_named_chat_template_is_refused(tmp_path: Path):
    root = f"file://{tmp_path}/store"
    stored = write(Store(root), 1, {**WEIGHTS, TEMPLATE: b"tools"})
    template = path_of(stored) / TEMPLATE
    template.rename(tmp_path / "elsewhere")
    template.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightError, match=f"{template} is a symbolic link; it is refused"):
        pull(announced(stored), root, tmp_path / "copy")


def truncate(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(WEIGHTS["model.safetensors"][:-1])


def alter(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"x" + WEIGHTS["model.safetensors"][1:])


def remove(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def agree_on_it(directory: Path) -> None:
    """Alter a file, and the manifest with it."""
    alter(directory)
    (directory / MANIFEST).write_bytes(to_bytes(describe(directory)))


def link(directory: Path) -> None:
    elsewhere = directory.parents[1] / "elsewhere"
    (directory / "config.json").rename(elsewhere)
    (directory / "config.json").symlink_to(elsewhere)


def link_all(directory: Path) -> None:
    directory.rename(directory.parents[1] / "moved")
    directory.symlink_to(directory.parents[1] / "moved")


def link_learner(directory: Path) -> None:
    link_all(directory.parent)


def link_manifest(directory: Path) -> None:
    (directory / MANIFEST).rename(directory.parents[1] / "elsewhere")
    (directory / MANIFEST).symlink_to(directory.parents[1] / "elsewhere")


def name_another(name: str) -> Any:
    """Let the manifest name a file that lies elsewhere, truthfully; `$` is the store's parent."""

    def spoil(directory: Path) -> None:
        (directory.parents[2] / "secret").write_bytes(b"of somebody else")
        spoken = name.replace("$", str(directory.parents[2]))
        file = hash_file(directory.parents[2] / "secret")._replace(name=spoken)
        (directory / MANIFEST).write_bytes(to_bytes(Manifest((file,))))

    return spoil


@pytest.mark.parametrize("pulled", ["copied", "linked"])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            truncate,
            (
                "model.safetensors has 6999 bytes with sha256 [0-9a-f]{64}, announced are 7000"
                " bytes with sha256 [0-9a-f]{64}"
            ),
        ),
        (
            alter,
            (
                "model.safetensors has 7000 bytes with sha256 [0-9a-f]{64}, announced are 7000"
                " bytes with sha256 [0-9a-f]{64}"
            ),
        ),
        (remove, "model.safetensors is missing"),
        (
            agree_on_it,
            (
                "its manifest.json describes 7002 bytes with sha256 [0-9a-f]{64}, announced are"
                " 7002 bytes with sha256 [0-9a-f]{64}"
            ),
        ),
        (
            lambda directory: (directory / MANIFEST).unlink(),
            "manifest.json does not exist: the version is incomplete, or has been deleted",
        ),
        (lambda directory: (directory / MANIFEST).write_bytes(b"{"), "is not a manifest"),
        (link, "config.json is a symbolic link; it is refused"),
        (link_all, "v000001-[0-9a-f]{16} is a symbolic link; it is refused"),
        (link_learner, "store/lead is a symbolic link; it is refused"),
        (link_manifest, "manifest.json is a symbolic link; it is refused"),
        (
            name_another("../../../secret"),
            "names '../../../secret', which is not a plain file name",
        ),
        (name_another("$/secret"), "names '.*/secret', which is not a plain file name"),
        (name_another("..\\..\\secret"), "which is not a plain file name"),
        (name_another("a/../../../../secret"), "which is not a plain file name"),
    ],
)
def test_a_spoilt_version_is_refused(tmp_path: Path, spoil: Any, says: str, pulled: str):
    root = f"file://{tmp_path}/store"
    stored = mine_alone(Store(f"{root}/lead"))
    spoil(path_of(stored))
    with pytest.raises(WeightError, match=says):
        pull(announced(stored), root, tmp_path / "copy", link=pulled == "linked")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("link", [False, True])
def test_who_only_reads_gets_another_name_of_the_same_files(link: bool, tmp_path: Path):
    store = Store(f"file://{tmp_path}/store")
    stored = mine_alone(store)
    there = pull(announced(stored), store.root, tmp_path / "copy", link)
    assert {
        name: (there / name).samefile(path_of(stored) / name) for name in WEIGHTS
    } == dict.fromkeys(WEIGHTS, link)
    store.prune(newest=9, keep=1)
    assert (
        store.versions() == []
        and {name: (there / name).read_bytes() for name in WEIGHTS} == WEIGHTS
    )


def somebody_elses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def another_file_system(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, monkeypatch: path.chmod(0o664),
        lambda path, monkeypatch: path.chmod(0o646),
        somebody_elses,
        another_file_system,
    ],
    ids=["the group may write", "all may write", "somebody else's", "another file system"],
)
def test_a_file_that_others_may_change_or_that_cannot_be_linked_is_copied(
    spoil: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = Store(f"file://{tmp_path}/store")
    stored = mine_alone(store)
    kept = path_of(stored) / "model.safetensors"
    spoil(kept, monkeypatch)
    there = pull(announced(stored), store.root, tmp_path / "copy", link=True)
    assert (
        not (there / kept.name).samefile(kept)
        and (there / kept.name).read_bytes() == WEIGHTS[kept.name]
    )


def test_a_link_that_took_the_place_of_a_file_after_the_look_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = Store(f"file://{tmp_path}/store")
    stored = mine_alone(store)
    link(path_of(stored))
    monkeypatch.setattr("streamrl.weights.files._refuse_links", lambda *_: None)
    with pytest.raises(
        WeightError, match="cannot be copied to .*copy: Too many levels of symbolic links"
    ):
        pull(announced(stored), store.root, tmp_path / "copy", link=True)
    assert not (tmp_path / "copy").exists()


def test_only_what_was_announced_is_copied(tmp_path: Path):
    """A file that lies beside the announced ones stays where it is, and what was at the destination
    goes.
    """
    stored = write(Store(f"file://{tmp_path}/store"), 1)
    (path_of(stored) / "modeling.py").write_text("print('anything')")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "of an earlier version").write_text("")
    there = pull(announced(stored), f"file://{tmp_path}/store", tmp_path / "copy")
    assert {path.name for path in there.iterdir()} == {*WEIGHTS, MANIFEST}


@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc",
        "file:///data/weights",
        "file:///data/weights/",
        "file:///data/weights/../secrets/v000001",
        "file:///data/weights/lead/%2e%2e/v000001",
        "file:///data/weights/lead%2Fv000001",
        "file:///data/weights/..",
        "file:///data/weights/lead/../../secrets",
        "file:///data/weights/./v000001",
        "file:///data/weights/lead\\..\\..\\secrets",
        "file:///data/weights/lead\0/v000001",
        "file:///DATA/weights/v000001",
        "simplecache::file:///data/weights/v000001",
        "memory://data/weights/v000001",
        "",
        "file:///data/weights//v000001",
        "file:///data/weights-of-others/v000001",
        "https://example.org/weights/v000001",
        "/data/weights/v000001",
    ],
)
def test_a_uri_outside_the_store_is_refused(uri: str, tmp_path: Path):
    with pytest.raises(
        WeightError,
        match="is not a version in the configured store file:///data/weights; it is refused",
    ):
        pull(
            PolicyVersion(learner="lead", version=1, uri=uri, size_bytes=1, sha256="00"),
            "file:///data/weights",
            tmp_path / "copy",
        )


def test_a_uri_inside_the_store_stays_as_it_is():
    assert (
        check_inside_store("s3://bucket/w/lead/v000001/", "s3://bucket/w/")
        == "s3://bucket/w/lead/v000001"
    )


def test_a_destination_that_cannot_be_written_is_said(tmp_path: Path):
    stored = write(Store(f"file://{tmp_path}/store"), 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        WeightError,
        match=r"version 1 at .* \(7002 bytes\) cannot be copied to .*/file/copy: Not a directory",
    ):
        pull(announced(stored), f"file://{tmp_path}/store", tmp_path / "file" / "copy")


def pipe(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path):
    """Reading it would wait for ever."""
    root = f"file://{tmp_path}/store"
    for spoil in (
        pipe,
        lambda directory: (directory / MANIFEST).unlink() or os.mkfifo(directory / MANIFEST),
    ):
        stored = write(Store(root), 1)
        spoil(path_of(stored))
        with pytest.raises(WeightError, match=r"\.json is not a regular file; it is refused"):
            pull(announced(stored), root, tmp_path / "copy", link=True)
        shutil.rmtree(path_of(stored))


def test_a_name_that_no_file_system_takes_is_a_weight_error(root: str, tmp_path: Path):
    stored = announced(write(Store(root), 1))
    far = msgspec.structs.replace(stored, uri=f"{root}/{'x' * 300}")
    with pytest.raises(WeightError, match="x: File name too long|does not exist"):
        pull(far, root, tmp_path / "copy")
    for chained in ("generic", "zip", "http"):
        other = msgspec.structs.replace(stored, uri=f"{stored.uri}::{chained}")
        with pytest.raises(WeightError, match="is not a version in the configured store"):
            pull(other, root, tmp_path / "copy")


def test_no_more_is_copied_than_was_announced(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A store's writer does not fill every server's disk: the copy ends behind the first byte too
    many.
    """
    stored = write(Store(root), 1)
    fs, path = fsspec.core.url_to_fs(stored.uri)
    fs.pipe_file(f"{path}/model.safetensors", bytes(3_000_000))
    sizes: list[int] = []
    monkeypatch.setattr(
        file_system,
        "differences",
        lambda expected, found: [
            *differences(expected, found),
            *map(sizes.append, _sizes(tmp_path)),
        ][:1],
    )
    with pytest.raises(WeightError, match="model.safetensors has 7001 bytes"):
        pull(announced(stored), root, tmp_path / "copy")
    assert max(sizes) == 7001


def _sizes(directory: Path) -> list[int]:
    return [found.stat().st_size for found in directory.glob("copy/*")]


def test_a_manifest_without_end_is_refused(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(file_system, "MANIFEST_BYTES", 100)
    stored = write(Store(root), 1)
    with pytest.raises(WeightError, match=r"manifest.json has more than 100 bytes; it is refused"):
        pull(announced(stored), root, tmp_path / "copy")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {**WEIGHTS, "pytorch_model.bin": b"x"},
            "names 'pytorch_model.bin', and weights have no file of that name; it is refused",
        ),
        (
            {**WEIGHTS, "modeling_x.py": b"x"},
            "names 'modeling_x.py', and weights have no file of that name; it is refused",
        ),
        (
            {**WEIGHTS, "config.json": b'{"auto_map": {"AutoModel": "x.Y"}}'},
            "config.json has an auto_map, which loads Python code; it is refused",
        ),
    ],
)
def test_what_is_no_weights_is_refused(
    root: str, tmp_path: Path, files: dict[str, bytes], says: str
):
    stored = write(Store(root), 1, files)
    with pytest.raises(WeightError, match=says):
        pull(announced(stored), root, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
