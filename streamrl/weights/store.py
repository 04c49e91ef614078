"""Where versions lie: directories in a store (any fsspec URI), written under a temporary name, verified, renamed, then announced by claim check.

Nothing is trusted because of its name: what is pulled is hashed against the announcement, and only from the configured store.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Container, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import fsspec
from fsspec.core import url_to_fs

from streamrl.errors import WeightError
from streamrl.records import PolicyVersion
from streamrl.weights.manifest import MANIFEST, File, Manifest, at_once, describe, differences, digest, from_bytes, hashed, plain, to_bytes

TEMPORARY = ".tmp-"
VERSION_NAME = re.compile(r"v(\d{6,})")


class Stored(NamedTuple):
    """The claim check."""

    uri: str
    size_bytes: int
    sha256: str


def version_name(version: int) -> str:
    """v000012: sorts as it counts."""
    return f"v{version:06d}"


def every_nth(newest: int, keep: int, every: int) -> set[int]:
    """The last `keep` of every `every`-th version up to `newest`, which the evaluator may still wait for; none when `every` is 0."""
    return {version for version in range(newest, max(newest - keep * every, -1), -1) if version % every == 0} if every else set()


class Store:
    """The versions of one learner under `root`, a directory URI. All its failures are WeightErrors."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._fs, self._path = _open(self.root)

    @contextmanager
    def writing(self, name: str, size_bytes: int = 0) -> Generator[Path]:
        """A local directory to write `name` into. When the block ends well it stands in the store whole; otherwise nothing of it is left.

        `size_bytes`: what it will take, for the message when the store is full.
        """
        temporary = f"{self._path}/{TEMPORARY}{name}"
        try:
            with self._removed_after(temporary), self._scratch(temporary) as directory:
                yield directory
                self._finish(directory, temporary, name)
        except OSError as error:
            raise self._failure(name, size_bytes, error) from None

    def claim(self, name: str) -> Stored:
        """The claim check of what stands in the store under that name."""
        manifest = read_manifest(self._fs, f"{self._path}/{name}")
        return Stored(f"{self.root}/{name}", manifest.size_bytes, manifest.sha256)

    def versions(self) -> list[int]:
        """Those in the store, oldest first."""
        if not self._fs.exists(self._path):
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path, detail=False))
        return sorted(int(match[1]) for match in map(VERSION_NAME.fullmatch, names) if match)

    def prune(self, newest: int, keep: int, but: Container[int] = ()) -> None:
        """Delete all versions but the `keep` up to `newest`, and `but` these. Later ones are left alone: they will be written again."""
        for version in self.versions():
            if version <= newest - keep and version not in but:
                self._fs.rm(f"{self._path}/{version_name(version)}", recursive=True)

    @contextmanager
    def _removed_after(self, path: str) -> Generator[None]:
        """Nothing is at `path` before (a process may have died here) nor after."""
        self._remove(path)
        try:
            yield
        finally:
            self._remove(path)

    def _remove(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    @contextmanager
    def _scratch(self, temporary: str) -> Generator[Path]:
        """Where it is written at first: in the store itself, if that is a directory of this machine."""
        if _local(self._fs):
            Path(temporary).mkdir(parents=True)
            yield Path(temporary)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)

    def _finish(self, directory: Path, temporary: str, name: str) -> None:
        manifest = describe(directory)
        (directory / MANIFEST).write_bytes(to_bytes(manifest))
        if not _local(self._fs):
            self._fs.put(f"{directory}/", f"{temporary}/", recursive=True)
            _raise_if(differences(manifest.files, files_in(self._fs, temporary, manifest)), f"{self.root}/{name}")
        self._remove(f"{self._path}/{name}")  # written, but never announced
        self._fs.mv(temporary, f"{self._path}/{name}", recursive=True)

    def _failure(self, name: str, size_bytes: int, error: OSError) -> WeightError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = f", {shutil.disk_usage(_existing(Path(self._path))).free} are free" if _local(self._fs) else ""
            hint = "free some space, lower weights.keep_versions, or set weights.store"
            return WeightError(f"the weight store {self.root} is full: {name} needs about {size_bytes} bytes{free}; {hint}")
        cause = error.strerror or error
        return WeightError(f"{name} could not be written to the weight store {self.root}: {cause}; set weights.store to a place that can be written")


def pull(version: PolicyVersion, store_root: str, destination: Path, link: bool = False) -> Path:
    """Copy an announced version to `destination` and verify it on the way. Raises WeightError, and leaves nothing, if it is not what was announced.

    `store_root`: the configured store; a URI outside it is refused, whatever it says. `link`: for who only reads it: files of this user on the same
    file system are not copied, but get another name there, which stays when the store deletes its own.
    """
    where = f"version {version.version} at {version.uri}"
    fs, path = _open(inside(version.uri, store_root))
    if _local(fs):
        _refuse_links(Path(path), Path(_open(store_root)[1]), where)
    manifest = read_manifest(fs, path)
    if (manifest.size_bytes, manifest.sha256) != (version.size_bytes, version.sha256):
        found = f"{manifest.size_bytes} bytes with sha256 {manifest.sha256}"
        raise WeightError(f"{where}: its {MANIFEST} stands for {found}, announced are {version.size_bytes} bytes with sha256 {version.sha256}")
    shutil.rmtree(destination, ignore_errors=True)
    try:
        destination.mkdir(parents=True)
        _raise_if(differences(manifest.files, files_in(fs, path, manifest, destination, link)), where)
        (destination / MANIFEST).write_bytes(to_bytes(manifest))
    except OSError as error:
        shutil.rmtree(destination, ignore_errors=True)
        raise WeightError(f"{where} ({version.size_bytes} bytes) cannot be copied to {destination}: {error.strerror or error}") from None
    except WeightError:
        shutil.rmtree(destination, ignore_errors=True)
        raise
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
    except OSError as error:
        raise WeightError(f"{where} cannot be read: {error.strerror or error}") from None


def files_in(fs: fsspec.AbstractFileSystem, path: str, manifest: Manifest, copy_to: Path | None = None, link: bool = False) -> list[File]:
    """What really lies there under the names of the manifest, hashed in one pass, and copied in the same one; several files at a time.

    `link`: where `_linked` can, instead of copying.
    """
    found = at_once(lambda file: _read(fs, f"{path}/{file.name}", copy_to, link), manifest.files)
    return [file for file in found if file is not None]


def _read(fs: fsspec.AbstractFileSystem, source: str, copy_to: Path | None, link: bool) -> File | None:
    name = source.rpartition("/")[2]
    try:
        if link and copy_to is not None and _local(fs) and _linked(Path(source), copy_to / name):
            return hashed(copy_to / name)
        with fs.open(source, "rb") as opened:
            if copy_to is None:
                return File(name, *digest(cast(Any, opened)))
            with (copy_to / name).open("wb") as copy:
                return File(name, *digest(cast(Any, opened), copy))
    except FileNotFoundError:
        return None


def _linked(source: Path, destination: Path) -> bool:
    """Give a file another name. False, and nothing is there, where that cannot be, or where others than this user may write to it, hashed or not."""
    try:
        os.link(source, destination, follow_symlinks=False)
    except (OSError, NotImplementedError):  # another file system, or one that has no links, or somebody else's file
        return False
    found = destination.lstat()
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    destination.unlink()
    return False


def _refuse_links(path: Path, root: Path, where: str) -> None:
    """No symbolic link below the root, be it the version or a file of it: it may lead anywhere, and change after the check."""
    steps = (*path.relative_to(root).parents, path.relative_to(root))
    links = [found for found in (*(root / step for step in steps if step.name), *(path.iterdir() if path.is_dir() else ())) if found.is_symlink()]
    if links:
        raise WeightError(f"{where}: {links[0]} is a symbolic link; it is refused")


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


def _existing(path: Path) -> Path:
    """The nearest directory above that exists."""
    return next(place for place in (path, *path.parents) if place.exists())
