"""Where versions lie: directories in a store (any fsspec URI), written under a temporary name,
verified, renamed, then announced by claim check.

The name of a version ends with the beginning of its hash, so that two results of one version (a
learner that was taken for dead, a new lineage) lie beside each other, and what is announced is
never replaced. Nothing is trusted because of its name: what is pulled is hashed against the
announcement, and only from the configured store. A file system may raise anything; whatever it
raises is a WeightError.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Container, Generator
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import fsspec
from fsspec.core import url_to_fs

from streamrl.errors import WeightError, describe_error
from streamrl.records import PolicyVersion
from streamrl.weights.manifest import (
    CONFIG,
    MANIFEST,
    NAMES,
    File,
    Manifest,
    at_once,
    describe,
    differences,
    digest,
    from_bytes,
    plain,
    to_bytes,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

TEMPORARY = ".tmp-"
MANIFEST_BYTES = 16 << 20  # that are read of a manifest: 100,000 files
VERSION_NAME = re.compile(r"v(\d{6,})(-[0-9a-f]{16})?")  # without a hash: of an earlier streamrl


class Stored(NamedTuple):
    """The claim check."""

    uri: str
    size_bytes: int
    sha256: str


def version_name(version: int) -> str:
    """v000012: sorts as it counts."""
    return f"v{version:06d}"


def every_nth(newest: int, keep: int, every: int) -> set[int]:
    """The last `keep` of every `every`-th version up to `newest`, which the evaluator may still
    wait for; none when `every` is 0.
    """
    return (
        {
            version
            for version in range(newest, max(newest - keep * every, -1), -1)
            if version % every == 0
        }
        if every
        else set()
    )


class Store:
    """The versions of one learner under `root`, a directory URI. All its failures are WeightErrors."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._fs, self._path = _open(self.root)

    def put(self, version: int, write: Callable[[Path], object], size_bytes: int = 0) -> Stored:
        """Have `write` write a version into a local directory. It stands in the store whole, or
        nothing of it is left. Returns its claim check.

        `size_bytes`: what it will take, for the message when the store is full. What `write` raises
        is raised, an OSError as a WeightError.
        """
        name = version_name(version)
        temporary = f"{self._path}/{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with self._removed_after(temporary), self._scratch(temporary) as directory:
                write(directory)
                manifest = self._finish(directory, temporary, name)
        except OSError as error:
            raise self._failure(name, size_bytes, error) from None
        return Stored(
            f"{self.root}/{_directory(name, manifest.sha256)}", manifest.size_bytes, manifest.sha256
        )

    def holds(self, version: PolicyVersion) -> bool:
        """Does a version lie where it was announced, as it was announced, and is that in this
        store? All of it is read.

        Raises WeightError where nobody can tell.
        """
        if not version.uri.startswith(f"{self.root}/"):
            return False
        path = _open(version.uri)[1]
        if not _told(
            lambda: self._fs.exists(f"{path}/{MANIFEST}"), f"the weight store {self.root}"
        ):
            return False
        try:
            manifest = read_manifest(self._fs, path)
        except WeightError:
            return False
        return manifest.sha256 == version.sha256 and not differences(
            manifest.files, files_in(self._fs, path, manifest)
        )

    def clear(self) -> None:
        """Remove what processes that died while they wrote have left. Only for the one process that
        writes. Best effort: it is only room.
        """
        try:
            left = self._fs.glob(f"{self._path}/{TEMPORARY}*")
            for path in left:
                self._remove(str(path))
        except Exception as error:
            logger.warning(
                "what was left half-written stays in the weight store %s: %s", self.root, error
            )

    def versions(self) -> list[int]:
        """Those in the store, oldest first. Raises WeightError."""
        return sorted(self._names())

    def _names(self) -> dict[int, list[str]]:
        """The directories of each version: one for each result it has had."""

        def listed() -> list[str]:
            return self._fs.ls(self._path, detail=False) if self._fs.exists(self._path) else []

        found = dict[int, list[str]]()
        for path in _told(listed, f"the weight store {self.root} cannot be listed"):
            name = str(path).rstrip("/").rpartition("/")[2]
            if match := VERSION_NAME.fullmatch(name):
                found.setdefault(int(match[1]), []).append(name)
        return found

    def prune(self, newest: int, keep: int, but: Container[int] = ()) -> None:
        """Delete all versions but the `keep` up to `newest`, and `but` these. Later ones are left
        alone: they will be written again.

        Raises WeightError.
        """
        for version, names in self._names().items():
            if version <= newest - keep and version not in but:
                for name in names:
                    _told(
                        partial(self._remove, f"{self._path}/{name}"),
                        f"{name} cannot be deleted from the weight store {self.root}",
                    )

    @contextmanager
    def _removed_after(self, path: str) -> Generator[None]:
        """Nothing is at `path` afterwards."""
        try:
            yield
        finally:
            with suppress(Exception):  # it is only room, and what went wrong before says more
                self._remove(path)

    def _remove(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    @contextmanager
    def _scratch(self, temporary: str) -> Generator[Path]:
        """Where it is written at first: in the store itself, if that is a directory of this
        machine.
        """
        if _local(self._fs):
            Path(temporary).mkdir(parents=True)
            yield Path(temporary)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)

    def _finish(self, directory: Path, temporary: str, name: str) -> Manifest:
        manifest = describe(directory)
        (directory / MANIFEST).write_bytes(to_bytes(manifest))
        final = f"{self._path}/{_directory(name, manifest.sha256)}"
        _told(
            lambda: self._move(directory, temporary, final, manifest),
            f"{name} could not be written to the weight store {self.root}",
        )
        return manifest

    def _move(self, directory: Path, temporary: str, final: str, manifest: Manifest) -> None:
        if not _local(self._fs):
            self._fs.put(f"{directory}/", f"{temporary}/", recursive=True)
            _raise_if(differences(manifest.files, files_in(self._fs, temporary, manifest)), final)
        if self._fs.exists(final):
            if not differences(
                manifest.files, files_in(self._fs, final, manifest)
            ) and self._fs.exists(f"{final}/{MANIFEST}"):
                return  # the same bytes, written before
            self._remove(final)  # damaged
        self._fs.mv(temporary, final, recursive=True)

    def _failure(self, name: str, size_bytes: int, error: OSError) -> WeightError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = (
                f", {shutil.disk_usage(_existing(Path(self._path))).free} are free"
                if _local(self._fs)
                else ""
            )
            hint = "free some space, lower weights.keep_versions, or set weights.store"
            return WeightError(
                f"the weight store {self.root} is full: {name} needs about {size_bytes} bytes{free}; {hint}"
            )
        cause = error.strerror or error
        return WeightError(
            f"{name} could not be written to the weight store {self.root}: {cause}; set weights.store to a place that can be written"
        )


def _directory(name: str, sha256: str) -> str:
    return f"{name}-{sha256[:16]}"


def _told(ask: Callable[[], T], what: str) -> T:
    """What a file system answers. Raises WeightError for whatever it raises but an OSError with an
    errno, which says what to do about it.
    """
    try:
        return ask()
    except WeightError:
        raise
    except Exception as error:
        # each kind of store has errors of its own: botocore's, aiohttp's, google's
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        cause = getattr(error, "strerror", None) or describe_error(error)
        raise WeightError(f"{what}: {cause}") from None


def pull(version: PolicyVersion, store_root: str, destination: Path, link: bool = False) -> Path:
    """Copy an announced version to `destination` and verify it on the way. Raises WeightError, and
    leaves nothing, if it is not what was announced.

    `store_root`: the configured store; a URI outside it is refused, whatever it says. `link`: for
    who only reads it: files of this user on the same file system are not copied, but get another
    name there, which stays when the store deletes its own.
    """
    where = f"version {version.version} at {version.uri}"
    fs, path = _open(inside(version.uri, store_root))
    if _local(fs):
        _refuse_links(Path(path), Path(_open(store_root)[1]), where)
    manifest = read_manifest(fs, path)
    if (manifest.size_bytes, manifest.sha256) != (version.size_bytes, version.sha256):
        found = f"{manifest.size_bytes} bytes with sha256 {manifest.sha256}"
        raise WeightError(
            f"{where}: its {MANIFEST} stands for {found}, announced are {version.size_bytes} bytes with sha256 {version.sha256}"
        )
    check_names(manifest, where)
    shutil.rmtree(destination, ignore_errors=True)
    try:
        destination.mkdir(parents=True)
        _raise_if(
            differences(manifest.files, files_in(fs, path, manifest, destination, link)), where
        )
        check_settings(destination, where)
        (destination / MANIFEST).write_bytes(to_bytes(manifest))
    except WeightError:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    except Exception as error:  # of this disk, or of the store: each kind has errors of its own
        shutil.rmtree(destination, ignore_errors=True)
        cause = getattr(error, "strerror", None) or describe_error(error)
        raise WeightError(
            f"{where} ({version.size_bytes} bytes) cannot be copied to {destination}: {cause}"
        ) from None
    return destination


def inside(uri: str, store_root: str) -> str:
    """The URI, if it lies in the store by plain names. Raises WeightError otherwise."""
    root = store_root.rstrip("/") + "/"
    child = uri.removeprefix(root).rstrip("/")
    if (
        not uri.startswith(root)
        or "%" in child
        or not all(plain(name) for name in child.split("/"))
    ):
        raise WeightError(
            f"{uri} is not a version in the configured store {store_root}; it is refused"
        )
    return root + child


def read_manifest(fs: fsspec.AbstractFileSystem, path: str) -> Manifest:
    """Raises WeightError."""
    where = f"{path}/{MANIFEST}"
    try:
        with _opened(fs, where) as opened:
            data = opened.read(MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise WeightError(
            f"{where} does not exist: the version is incomplete, or has been deleted"
        ) from None
    except WeightError:
        raise
    except Exception as error:
        raise WeightError(
            f"{where} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if len(data) > MANIFEST_BYTES:
        raise WeightError(f"{where} has more than {MANIFEST_BYTES} bytes; it is refused")
    return from_bytes(data, where)


def files_in(
    fs: fsspec.AbstractFileSystem,
    path: str,
    manifest: Manifest,
    copy_to: Path | None = None,
    link: bool = False,
) -> list[File]:
    """What really lies there under the names of the manifest, hashed in one pass, and copied in the
    same one; several files at a time.

    Of a file that is larger than the manifest says, only the first byte too many is read. `link`:
    where `_linked` can, instead of copying.
    """
    found = at_once(
        lambda file: _read(fs, f"{path}/{file.name}", file.size_bytes, copy_to, link),
        manifest.files,
    )
    return [file for file in found if file is not None]


def _read(
    fs: fsspec.AbstractFileSystem, source: str, size_bytes: int, copy_to: Path | None, link: bool
) -> File | None:
    name = source.rpartition("/")[2]
    try:
        if link and copy_to is not None and _local(fs) and _linked(Path(source), copy_to / name):
            source, copy_to = str(copy_to / name), None
        with _opened(fs, source) as opened:
            if copy_to is None:
                return File(name, *digest(opened, limit=size_bytes + 1))
            with (copy_to / name).open("wb") as copy:
                return File(name, *digest(opened, copy, limit=size_bytes + 1))
    except FileNotFoundError:
        return None


@contextmanager
def _opened(fs: fsspec.AbstractFileSystem, path: str) -> Generator[FileIO]:
    """A file to read from. Of this machine's only regular ones: reading a pipe would wait for ever.
    Raises WeightError for others.
    """
    if not _local(fs):
        with fs.open(path, "rb") as opened:
            yield cast(FileIO, opened)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WeightError(f"{path} is not a regular file; it is refused")
        yield opened


def check_names(manifest: Manifest, where: str) -> None:
    """Only what weights consist of: safetensors, and the settings and the tokenizer of a model.
    Raises WeightError.

    vLLM would load a pickle, and transformers run a module, that lies beside them.
    """
    for file in manifest.files:
        if file.name not in NAMES and not file.name.endswith(".safetensors"):
            raise WeightError(
                f"{where} has a file {file.name!r}, and weights have none of that name; it is refused"
            )


def check_settings(directory: Path, where: str) -> None:
    """No settings that have Python code loaded. Raises WeightError."""
    try:
        settings = json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):  # then nobody can load it
        return
    if isinstance(settings, dict) and "auto_map" in settings:
        raise WeightError(
            f"{where}: {CONFIG} has an auto_map, which loads Python code; it is refused"
        )


def _linked(source: Path, destination: Path) -> bool:
    """Give a file another name. False, and nothing is there, where that cannot be, or where others
    than this user may write to it, hashed or not.
    """
    try:
        os.link(source, destination, follow_symlinks=False)
    except (OSError, NotImplementedError):
        # another file system, or one that has no links, or somebody else's file
        return False
    found = destination.lstat()
    if (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        return True
    destination.unlink()
    return False


def _refuse_links(path: Path, root: Path, where: str) -> None:
    """No symbolic link below the root, be it the version or a file of it: it may lead anywhere, and
    change after the check.
    """
    steps = (*path.relative_to(root).parents, path.relative_to(root))
    links = [
        found
        for found in (
            *(root / step for step in steps if step.name),
            *(path.iterdir() if path.is_dir() else ()),
        )
        if found.is_symlink()
    ]
    if links:
        raise WeightError(f"{where}: {links[0]} is a symbolic link; it is refused")


def _raise_if(problems: list[str], where: str) -> None:
    if problems:
        raise WeightError(f"{where} is not what was announced: {'; '.join(problems)}")


def _open(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        fs, path = url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise WeightError(
            f"weight store {uri}: {error}; weights.store takes any URI that fsspec knows, for instance file:///data/weights"
        ) from None
    return fs, str(path).rstrip("/")


def _local(fs: fsspec.AbstractFileSystem) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _existing(path: Path) -> Path:
    """The nearest directory above that exists."""
    return next(place for place in (path, *path.parents) if place.exists())
