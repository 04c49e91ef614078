"""Files of a version in any fsspec file system: opened, hashed and copied. A file system may raise
anything; callers make it a WeightError (`as_weight_error`, `pull`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, cast

import fsspec
from fsspec.core import url_to_fs

from streamrl.system.errors import WeightError, describe_error
from streamrl.weights.manifest import (
    MANIFEST,
    Manifest,
    WeightFile,
    differences,
    from_bytes,
    is_plain_filename,
)

CHUNK_BYTES = 1 << 20
MANIFEST_BYTES = 16 << 20  # that are read of a manifest: 100,000 files
T = TypeVar("T")
R = TypeVar("R")

_threads = ThreadPoolExecutor(os.cpu_count(), "files")
"""Module-level on purpose: starting a thread right after a training step, while XLA frees memory,
took 50 ms."""


class Readable(Protocol):
    """An open file, on this machine or in a store."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def open_store(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        fs, path = url_to_fs(uri)
    except (ValueError, TypeError, ImportError) as error:
        raise WeightError(
            f"weight store {uri}: {error}; weights.store takes any URI that fsspec knows, for"
            " instance file:///data/weights"
        ) from None
    return fs, str(path).rstrip("/")


def open_version(uri: str, store_root: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Open the store at one of its versions. Raises WeightError for a URI outside the store, and
    for a version that has symbolic links.
    """
    fs, path = open_store(check_inside_store(uri, store_root))
    if is_local(fs):
        root = Path(open_store(store_root)[1])
        as_weight_error(lambda: _refuse_links(Path(path), root, uri), uri)
    return fs, path


def check_inside_store(uri: str, store_root: str) -> str:
    """Return the URI if it is in the store and has only plain names. Raises WeightError
    otherwise.
    """
    root = store_root.rstrip("/") + "/"
    child = uri.removeprefix(root).rstrip("/")
    if (
        not uri.startswith(root)
        or "%" in child
        or "::" in child  # with which fsspec chains file systems
        or not all(is_plain_filename(name) for name in child.split("/"))
    ):
        raise WeightError(
            f"{uri} is not a version in the configured store {store_root}; it is refused"
        )
    return root + child


def _refuse_links(path: Path, root: Path, uri: str) -> None:
    """Refuse symbolic links below the root, as the version or as one of its files. A link may lead
    anywhere, and change after the check.
    """
    steps = (*path.relative_to(root).parents, path.relative_to(root))
    links = [
        entry
        for entry in (
            *(root / step for step in steps if step.name),
            *(path.rglob("*") if path.is_dir() else ()),
        )
        if entry.is_symlink()
    ]
    if links:
        raise WeightError(f"{uri}: {links[0]} is a symbolic link; it is refused")


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def as_weight_error(ask: Callable[[], T], what: str) -> T:
    """The result of `ask`, with every error as a WeightError, except for a full disk, which the
    caller reports with what to do about it.
    """
    try:
        return ask()
    except WeightError:
        raise
    except Exception as error:
        # each kind of store has its own errors: botocore's, aiohttp's, google's
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        cause = getattr(error, "strerror", None) or describe_error(error)
        raise WeightError(f"{what}: {cause}") from None


def read_manifest(fs: fsspec.AbstractFileSystem, path: str) -> Manifest:
    """The manifest of the version at `path`. Raises WeightError."""
    where = f"{path}/{MANIFEST}"
    try:
        with open_file(fs, where) as opened:
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


def verify(
    fs: fsspec.AbstractFileSystem,
    path: str,
    manifest: Manifest,
    where: str,
    copy_to: Path | None = None,
    link: bool = False,
) -> None:
    """Compare the files at `path` with the manifest and, with `copy_to`, copy them on the way.
    Raises WeightError if one is missing or differs. `where`: what the error calls the version.
    """
    problems = differences_at(fs, path, manifest, copy_to, link)
    if problems:
        raise WeightError(f"{where} is not what was announced: {'; '.join(problems)}")


def differences_at(
    fs: fsspec.AbstractFileSystem,
    path: str,
    manifest: Manifest,
    copy_to: Path | None = None,
    link: bool = False,
) -> list[str]:
    """The differences between the files at `path` and the manifest, by file. Each file is hashed
    and, with `copy_to`, copied in the same pass, several in parallel.

    A file that is larger than the manifest's size is read up to the first excess byte only. With
    `link`, files are linked instead of copied where `_try_link` can.
    """
    files = parallel_map(
        lambda file: _read(fs, path, file, copy_to, link),
        manifest.files,
    )
    return differences(manifest.files, [file for file in files if file is not None])


def _read(
    fs: fsspec.AbstractFileSystem, path: str, file: WeightFile, copy_to: Path | None, link: bool
) -> WeightFile | None:
    """What there is at `path` of a file, or None."""
    source = f"{path}/{file.name}"
    limit = file.size_bytes + 1
    copy = copy_to / file.name if copy_to else None
    if copy is not None:
        copy.parent.mkdir(exist_ok=True)
    try:
        if link and copy is not None and is_local(fs) and _try_link(Path(source), copy):
            source = str(copy)
            copy = None
        with open_file(fs, source) as opened:
            if copy is None:
                return WeightFile(file.name, *digest(opened, limit=limit))
            with copy.open("wb") as copied:
                return WeightFile(file.name, *digest(opened, copied, limit=limit))
    except FileNotFoundError:
        return None


@contextmanager
def open_file(fs: fsspec.AbstractFileSystem, path: str) -> Generator[FileIO]:
    """Open a file for reading. On this machine it must be a regular file, because reading a pipe
    could block forever. Raises WeightError otherwise.
    """
    if not is_local(fs):
        with fs.open(path, "rb") as opened:
            yield cast(FileIO, opened)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WeightError(f"{path} is not a regular file; it is refused")
        yield opened


def _try_link(source: Path, destination: Path) -> bool:
    """Hard-link a file. Returns False, and leaves nothing, if that is not possible, or if other
    users could change the file after it was hashed.
    """
    try:
        os.link(source, destination, follow_symlinks=False)
    except (OSError, NotImplementedError):
        # another file system, or one that has no links, or another user's file
        return False
    status = destination.lstat()
    if (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        return True
    destination.unlink()
    return False


def describe(directory: Path) -> Manifest:
    """The manifest of the files in a directory, without the manifest file itself."""
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if not path.is_dir() and path.name != MANIFEST
    )
    return Manifest(tuple(parallel_map(lambda name: hash_file(directory / name, name), names)))


def hash_file(path: Path, name: str = "") -> WeightFile:
    """The manifest's entry of a file. `name`: that it has in the version; by default its own."""
    with path.open("rb") as opened:
        size_bytes, sha256 = digest(opened)
    return WeightFile(name or path.name, size_bytes, sha256)


def digest(
    opened: Readable, copy_to: BinaryIO | None = None, limit: int | None = None
) -> tuple[int, str]:
    """(bytes, SHA-256) of the rest of an open file, or of its next `limit` bytes. They are written
    to `copy_to` in the same pass.
    """
    state = hashlib.sha256()
    size_bytes = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while read := opened.readinto(buffer if limit is None else buffer[: limit - size_bytes]):
        state.update(buffer[:read])
        size_bytes += read
        if copy_to is not None:
            copy_to.write(buffer[:read])
    return size_bytes, state.hexdigest()


def parallel_map(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Apply `work` to the items, in parallel on all cores, and return the results in order.
    Hashing, reading and writing release Python's lock.

    If one fails, its error is raised once all others have ended.
    """
    running = [_threads.submit(work, item) for item in items]
    wait(running)
    return [one.result() for one in running]
