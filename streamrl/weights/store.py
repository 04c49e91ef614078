"""Where versions lie: directories in a store (any fsspec URI), written under a temporary name, verified, renamed, announced. Topics carry the claim check.

Nothing is trusted because of its name: what is pulled is hashed against the announcement, and only from the configured store.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import fsspec
from fsspec.core import url_to_fs

from streamrl.errors import WeightError
from streamrl.records import PolicyVersion
from streamrl.weights.manifest import MANIFEST, File, Manifest, describe, differences, digest, from_bytes, plain, to_bytes

TEMPORARY = ".tmp-"


class Stored(NamedTuple):
    """The claim check."""

    uri: str
    size_bytes: int
    sha256: str


class Store:
    """The versions of one learner under `root`, a directory URI."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._fs, self._path = _open(self.root)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A local directory to write version `name` into. When the block ends well the version stands in the store whole; otherwise nothing of it is left."""
        temporary = f"{self._path}/{TEMPORARY}{name}"
        try:
            if self._fs.exists(temporary):  # left by a process that died
                self._fs.rm(temporary, recursive=True)
            if _local(self._fs):
                Path(temporary).mkdir(parents=True)
                yield Path(temporary)
                self._finish(Path(temporary), temporary, name)
            else:
                with tempfile.TemporaryDirectory() as scratch:
                    yield Path(scratch)
                    (Path(scratch) / MANIFEST).write_bytes(to_bytes(describe(Path(scratch))))
                    self._fs.put(scratch + "/", temporary + "/", recursive=True)
                    self._finish(Path(scratch), temporary, name)
        except OSError as error:
            raise self._full(name, temporary, error) from None
        finally:
            if self._fs.exists(temporary):
                self._fs.rm(temporary, recursive=True)

    def claim(self, name: str) -> Stored:
        """The claim check of a version that stands in the store."""
        manifest = read_manifest(self._fs, f"{self._path}/{name}")
        return Stored(f"{self.root}/{name}", manifest.size_bytes, manifest.sha256)

    def names(self) -> list[str]:
        """Versions in the store, oldest first: names sort by version."""
        if not self._fs.exists(self._path):
            return []
        found = [str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in self._fs.ls(self._path, detail=True) if entry["type"] == "directory"]
        return sorted(name for name in found if not name.startswith("."))

    def prune(self, keep: int, always: tuple[str, ...] = ()) -> None:
        """Delete all but the newest `keep` versions, and those named in `always`."""
        for name in self.names()[:-keep]:
            if name not in always:
                self._fs.rm(f"{self._path}/{name}", recursive=True)

    def remove(self, name: str) -> None:
        self._fs.rm(f"{self._path}/{name}", recursive=True)

    def _finish(self, directory: Path, temporary: str, name: str) -> None:
        manifest = describe(directory)
        (directory / MANIFEST).write_bytes(to_bytes(manifest))
        final = f"{self._path}/{name}"
        if not _local(self._fs):
            _raise_if(differences(manifest.files, remote_files(self._fs, temporary, manifest)), f"{self.root}/{name}")
        if self._fs.exists(final):
            self._fs.rm(final, recursive=True)
        self._fs.mv(temporary, final, recursive=True)

    def _full(self, name: str, temporary: str, error: OSError) -> WeightError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return WeightError(f"the weight store {self.root} is full: {name} could not be written; free space there, lower weights.keep_versions, or set weights.store")
        return WeightError(f"version {name} could not be written to {self.root} ({error.strerror or error})")


def version_name(version: int) -> str:
    """v000012: sorts as it counts."""
    return f"v{version:06d}"


def pull(version: PolicyVersion, store_root: str, destination: Path) -> Path:
    """Copy an announced version to `destination` and verify it on the way. Raises WeightError, and leaves nothing, if it is not what was announced.

    `store_root`: the configured store; a URI outside it is refused, whatever it says.
    """
    where = f"version {version.version} at {version.uri}"
    fs, path = _open(inside(version.uri, store_root))
    if _local(fs) and Path(path).is_symlink():
        raise WeightError(f"{where} is a symbolic link; it is refused")
    manifest = read_manifest(fs, path)
    if manifest.sha256 != version.sha256:
        raise WeightError(f"{where}: its manifest has sha256 {manifest.sha256}, announced is {version.sha256}")
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    try:
        _raise_if(differences(manifest.files, [_copy(fs, path, file, destination, where) for file in manifest.files]), where)
    except (OSError, WeightError) as error:
        shutil.rmtree(destination, ignore_errors=True)
        raise error if isinstance(error, WeightError) else WeightError(f"{where} cannot be copied to {destination} ({error.strerror or error})") from None
    (destination / MANIFEST).write_bytes(to_bytes(manifest))
    return destination


def inside(uri: str, store_root: str) -> str:
    """The URI, if it lies in the store by plain names. Raises WeightError otherwise."""
    root = store_root.rstrip("/") + "/"
    child = uri.removeprefix(root).rstrip("/")
    if not uri.startswith(root) or "%" in child or not all(plain(name) for name in child.split("/")):
        raise WeightError(f"{uri} is not a version in the configured store {store_root}; it is refused")
    return root + child


def read_manifest(fs: fsspec.AbstractFileSystem, path: str) -> Manifest:
    where = f"{path}/{MANIFEST}"
    try:
        return from_bytes(cast(bytes, fs.cat_file(where)), where)
    except FileNotFoundError:
        raise WeightError(f"{where} does not exist: the version is incomplete, or has been deleted") from None


def remote_files(fs: fsspec.AbstractFileSystem, path: str, manifest: Manifest) -> list[File]:
    """What lies in the store of the files that a manifest names, hashed there and then."""
    found: list[File] = []
    for file in manifest.files:
        with fs.open(f"{path}/{file.name}", "rb") as opened:
            found.append(File(file.name, *digest(cast(Any, opened))))
    return found


def _copy(fs: fsspec.AbstractFileSystem, path: str, file: File, destination: Path, where: str) -> File:
    source = f"{path}/{file.name}"
    if _local(fs) and Path(source).is_symlink():
        raise WeightError(f"{where}: {file.name} is a symbolic link; it is refused")
    try:
        with fs.open(source, "rb") as opened, (destination / file.name).open("wb") as copy:
            return File(file.name, *digest(cast(Any, opened), copy))
    except FileNotFoundError:
        raise WeightError(f"{where}: {file.name} is missing") from None


def _raise_if(problems: list[str], where: str) -> None:
    if problems:
        raise WeightError(f"{where} is not what was announced: {'; '.join(problems)}")


def _open(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        fs, path = url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise WeightError(f"weight store {uri}: {error}; weights.store takes any URI that fsspec knows, for instance file:///data/weights") from None
    return fs, str(path).rstrip("/")


def _local(fs: fsspec.AbstractFileSystem) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
