"""Files of a version in any fsspec file system: opened, hashed and copied. A file system may raise
anything; here every error of it becomes a WeightError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TypeVar, cast

import fsspec
from fsspec.core import url_to_fs

from streamrl.errors import WeightError, describe_error
from streamrl.weights.manifest import (
    MANIFEST,
    Manifest,
    WeightFile,
    digest,
    from_bytes,
    parallel_map,
)

T = TypeVar("T")

MANIFEST_BYTES = 16 << 20  # that are read of a manifest: 100,000 files


def open_store(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        fs, path = url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise WeightError(
            f"weight store {uri}: {error}; weights.store takes any URI that fsspec knows, for"
            " instance file:///data/weights"
        ) from None
    return fs, str(path).rstrip("/")


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
        # each kind of store has errors of its own: botocore's, aiohttp's, google's
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
    files = parallel_map(
        lambda file: _read(fs, f"{path}/{file.name}", file.size_bytes, copy_to, link),
        manifest.files,
    )
    return [file for file in files if file is not None]


def _read(
    fs: fsspec.AbstractFileSystem, source: str, size_bytes: int, copy_to: Path | None, link: bool
) -> WeightFile | None:
    name = source.rpartition("/")[2]
    try:
        if (
            link
            and copy_to is not None
            and is_local(fs)
            and _try_link(Path(source), copy_to / name)
        ):
            source = str(copy_to / name)
            copy_to = None
        with open_file(fs, source) as opened:
            if copy_to is None:
                return WeightFile(name, *digest(opened, limit=size_bytes + 1))
            with (copy_to / name).open("wb") as copy:
                return WeightFile(name, *digest(opened, copy, limit=size_bytes + 1))
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
        # another file system, or one that has no links, or somebody else's file
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


def raise_if_different(problems: list[str], where: str) -> None:
    if problems:
        raise WeightError(f"{where} is not what was announced: {'; '.join(problems)}")
