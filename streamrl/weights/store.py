"""The weight store: versions as directories under any fsspec URI. A version is written under a
temporary name, verified and renamed, and then announced by its URI, size and hash (claim check).

A directory's name ends with the beginning of its hash, so two results of one version (by a learner
that was taken for dead, or of a new lineage) lie next to each other, and what was announced is
never replaced. No name is trusted: what is pulled must come from the configured store, and its hash
must be the announced one. A file system may raise anything; here every error of it becomes a
WeightError.
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
from streamrl.records import AdapterBase, AdapterCheck, PolicyVersion
from streamrl.weights.manifest import (
    CONFIG,
    MANIFEST,
    NAMES,
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

logger = logging.getLogger(__name__)
T = TypeVar("T")

TEMPORARY = ".tmp-"
MANIFEST_BYTES = 16 << 20  # that are read of a manifest: 100,000 files
VERSION_NAME = re.compile(r"v(\d{6,})(-[0-9a-f]{16})?")  # without a hash: of an earlier streamrl


class WeightRef(NamedTuple):
    """The claim check: where a version lies, and what it must be."""

    uri: str
    size_bytes: int
    sha256: str


Stored = PolicyVersion | AdapterBase | AdapterCheck | WeightRef


def version_name(version: int) -> str:
    """v000012: names sort in the order of versions."""
    return f"v{version:06d}"


def pinned_for_eval(newest: int, keep: int, every: int) -> set[int]:
    """The last `keep` of the versions up to `newest` that `every` divides, which the evaluator may
    still need. Empty if `every` is 0.
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
    """The versions of one learner under `root`, a directory URI. All errors are WeightErrors."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._fs, self._path = _open(self.root)

    def put(self, version: int, write: Callable[[Path], object], size_bytes: int = 0) -> WeightRef:
        """Call `write` with a local directory, and put what it writes into the store, as a whole or
        not at all. Returns the claim check.

        `size_bytes`: the expected size, for the error message when the store is full. What `write`
        raises is raised, an OSError as a WeightError.
        """
        name = version_name(version)
        temporary = f"{self._path}/{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with self._removed_after(temporary), self._scratch(temporary) as directory:
                write(directory)
                manifest = self._publish(directory, temporary, name)
        except OSError as error:
            raise self._write_error(name, size_bytes, error) from None
        return self.ref(version, manifest)

    def ref(self, version: int, manifest: Manifest) -> WeightRef:
        """The claim check that `put` returns for a version with these files."""
        return WeightRef(
            f"{self.root}/{_directory(version_name(version), manifest.sha256)}",
            manifest.size_bytes,
            manifest.sha256,
        )

    def holds(self, version: Stored) -> bool:
        """Whether the announced version is in this store, with the announced contents. All of it is
        read.

        Raises WeightError if that cannot be determined.
        """
        if not version.uri.startswith(f"{self.root}/"):
            return False
        path = _open(version.uri)[1]
        if not _as_weight_error(
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
        """Remove what processes that died have left half-written. Only the one process that writes
        may call this. An error is logged and not raised, because only space is at stake.
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
        """The versions in the store, oldest first. Raises WeightError."""
        return sorted(self._names())

    def _names(self) -> dict[int, list[str]]:
        """The directories of each version: one for each of its results."""

        def listed() -> list[str]:
            return self._fs.ls(self._path, detail=False) if self._fs.exists(self._path) else []

        found = dict[int, list[str]]()
        for path in _as_weight_error(listed, f"the weight store {self.root} cannot be listed"):
            name = str(path).rstrip("/").rpartition("/")[2]
            if match := VERSION_NAME.fullmatch(name):
                found.setdefault(int(match[1]), []).append(name)
        return found

    def prune(self, newest: int, keep: int, but: Container[int] = ()) -> None:
        """Delete all versions up to `newest` except the last `keep` and those in `but`. Later
        versions stay: they will be written again. Raises WeightError.
        """
        for version, names in self._names().items():
            if version <= newest - keep and version not in but:
                for name in names:
                    _as_weight_error(
                        partial(self._remove, f"{self._path}/{name}"),
                        f"{name} cannot be deleted from the weight store {self.root}",
                    )

    @contextmanager
    def _removed_after(self, path: str) -> Generator[None]:
        """Remove `path` at the end of the block."""
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
        """The directory that a version is first written to. If the store is a directory of this
        machine, it lies in the store itself.
        """
        if _is_local(self._fs):
            Path(temporary).mkdir(parents=True)
            yield Path(temporary)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)

    def _publish(self, directory: Path, temporary: str, name: str) -> Manifest:
        manifest = describe(directory)
        (directory / MANIFEST).write_bytes(to_bytes(manifest))
        final = f"{self._path}/{_directory(name, manifest.sha256)}"
        _as_weight_error(
            lambda: self._move(directory, temporary, final, manifest),
            f"{name} could not be written to the weight store {self.root}",
        )
        return manifest

    def _move(self, directory: Path, temporary: str, final: str, manifest: Manifest) -> None:
        if not _is_local(self._fs):
            self._fs.put(f"{directory}/", f"{temporary}/", recursive=True)
            _raise_if_different(
                differences(manifest.files, files_in(self._fs, temporary, manifest)), final
            )
        if self._fs.exists(final):
            if not differences(
                manifest.files, files_in(self._fs, final, manifest)
            ) and self._fs.exists(f"{final}/{MANIFEST}"):
                return  # the same bytes, written before
            self._remove(final)  # damaged
        self._fs.mv(temporary, final, recursive=True)

    def _write_error(self, name: str, size_bytes: int, error: OSError) -> WeightError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = (
                f", {shutil.disk_usage(_existing(Path(self._path))).free} are free"
                if _is_local(self._fs)
                else ""
            )
            hint = "free some space, lower weights.keep_versions, or set weights.store"
            return WeightError(
                f"the weight store {self.root} is full: {name} needs about {size_bytes}"
                f" bytes{free}; {hint}"
            )
        cause = error.strerror or error
        return WeightError(
            f"{name} could not be written to the weight store {self.root}: {cause}; set"
            " weights.store to a place that can be written"
        )


def _directory(name: str, sha256: str) -> str:
    return f"{name}-{sha256[:16]}"


def _as_weight_error(ask: Callable[[], T], what: str) -> T:
    """The result of `ask`, with every error as a WeightError, except for a full disk, which the
    caller reports with what to do about it.
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


def pull(version: Stored, store_root: str, destination: Path, link: bool = False) -> Path:
    """Copy an announced version, or what it stands on, to `destination`, and verify it on the way.
    If it is not what was announced, raises WeightError and leaves nothing.

    `store_root`: the configured store. A URI outside it is refused. `link`: for callers that only
    read; files of this user on the same file system are hard-linked instead of copied, and stay
    when the store deletes its own name.
    """
    where = f"{_described(version)} at {version.uri}"
    fs, path = _open(check_inside_store(version.uri, store_root))
    if _is_local(fs):
        _refuse_links(Path(path), Path(_open(store_root)[1]), where)
    manifest = read_manifest(fs, path)
    if (manifest.size_bytes, manifest.sha256) != (version.size_bytes, version.sha256):
        found = f"{manifest.size_bytes} bytes with sha256 {manifest.sha256}"
        raise WeightError(
            f"{where}: its {MANIFEST} stands for {found}, announced are {version.size_bytes} bytes"
            f" with sha256 {version.sha256}"
        )
    check_names(manifest, where)
    shutil.rmtree(destination, ignore_errors=True)
    try:
        destination.mkdir(parents=True)
        _raise_if_different(
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


def _described(stored: Stored) -> str:
    if isinstance(stored, PolicyVersion):
        return f"version {stored.version}"
    if isinstance(stored, AdapterCheck):
        return "the check of adapters"
    return "the base of adapters"


def check_inside_store(uri: str, store_root: str) -> str:
    """Return the URI if it lies in the store and has only plain names. Raises WeightError
    otherwise.
    """
    root = store_root.rstrip("/") + "/"
    child = uri.removeprefix(root).rstrip("/")
    if (
        not uri.startswith(root)
        or "%" in child
        or not all(is_plain_filename(name) for name in child.split("/"))
    ):
        raise WeightError(
            f"{uri} is not a version in the configured store {store_root}; it is refused"
        )
    return root + child


def read_manifest(fs: fsspec.AbstractFileSystem, path: str) -> Manifest:
    """The manifest of the version at `path`. Raises WeightError."""
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
) -> list[WeightFile]:
    """The files of the manifest that are really there, hashed and, with `copy_to`, copied in the
    same pass, several in parallel.

    A file that is larger than the manifest says is read up to the first excess byte only. With
    `link`, files are linked instead of copied where `_try_link` can.
    """
    found = parallel_map(
        lambda file: _read(fs, f"{path}/{file.name}", file.size_bytes, copy_to, link),
        manifest.files,
    )
    return [file for file in found if file is not None]


def _read(
    fs: fsspec.AbstractFileSystem, source: str, size_bytes: int, copy_to: Path | None, link: bool
) -> WeightFile | None:
    name = source.rpartition("/")[2]
    try:
        if (
            link
            and copy_to is not None
            and _is_local(fs)
            and _try_link(Path(source), copy_to / name)
        ):
            source = str(copy_to / name)
            copy_to = None
        with _opened(fs, source) as opened:
            if copy_to is None:
                return WeightFile(name, *digest(opened, limit=size_bytes + 1))
            with (copy_to / name).open("wb") as copy:
                return WeightFile(name, *digest(opened, copy, limit=size_bytes + 1))
    except FileNotFoundError:
        return None


@contextmanager
def _opened(fs: fsspec.AbstractFileSystem, path: str) -> Generator[FileIO]:
    """Open a file for reading. On this machine it must be a regular file, because reading a pipe
    could block forever. Raises WeightError otherwise.
    """
    if not _is_local(fs):
        with fs.open(path, "rb") as opened:
            yield cast(FileIO, opened)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WeightError(f"{path} is not a regular file; it is refused")
        yield opened


def check_names(manifest: Manifest, where: str) -> None:
    """Check that a version consists of safetensors, config and tokenizer files only. Raises
    WeightError.

    vLLM would load a pickle, and transformers would run a module, that lies next to them.
    """
    for file in manifest.files:
        if file.name not in NAMES and not file.name.endswith(".safetensors"):
            raise WeightError(
                f"{where} has a file {file.name!r}, and weights have none of that name; it is"
                " refused"
            )


def check_settings(directory: Path, where: str) -> None:
    """Refuse a config.json that makes transformers load Python code. Raises WeightError."""
    try:
        settings = json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):  # then nobody can load it
        return
    if isinstance(settings, dict) and "auto_map" in settings:
        raise WeightError(
            f"{where}: {CONFIG} has an auto_map, which loads Python code; it is refused"
        )


def _try_link(source: Path, destination: Path) -> bool:
    """Hard-link a file. Returns False, and leaves nothing, if that is not possible, or if other
    users could change the file after it was hashed.
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
    """Refuse symbolic links below the root, as the version or as one of its files. A link may lead
    anywhere, and change after the check.
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


def _raise_if_different(problems: list[str], where: str) -> None:
    if problems:
        raise WeightError(f"{where} is not what was announced: {'; '.join(problems)}")


def _open(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        fs, path = url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise WeightError(
            f"weight store {uri}: {error}; weights.store takes any URI that fsspec knows, for"
            " instance file:///data/weights"
        ) from None
    return fs, str(path).rstrip("/")


def _is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _existing(path: Path) -> Path:
    """The nearest parent directory that exists."""
    return next(place for place in (path, *path.parents) if place.exists())
