"""Copies of a learner's checkpoints under any fsspec URI, so that it can continue on a machine
without its disk.

A copy becomes a checkpoint when its `position.json` is written, which is the last of its files, and
stops being one when that is deleted, which is the first. So a crash leaves no half of one. A copy
that a crash interrupted is made when the learner resumes, and halves of older ones are removed.

TensorStore and Levanter could write to the URI themselves. But then each save would wait for a
bucket, which may be slow or down, and fail with it; and a restart on the same disk would have to
read everything back. A learner that writes to its own disk and copies during training does neither.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs

from streamrl.learner.files import checkpoints
from streamrl.learner.files.checkpoints import POSITION
from streamrl.system.errors import CheckpointError, describe_error

logger = logging.getLogger(__name__)

NAME = re.compile(r"\d{6,}")
FETCHED = f"{checkpoints.TEMPORARY}fetched"


class CheckpointCopies:
    """The copies of one learner's checkpoints, in the directory `uri`."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")

    def versions(self) -> list[int]:
        """Versions that have a whole copy, oldest first. Raises CheckpointError."""
        with self._errors("cannot be listed"):
            files, root = self._open()
            return [
                version
                for version in _begun(files, root)
                if files.exists(f"{root}/{checkpoints.version_name(version)}/{POSITION}")
            ]

    def put(self, directory: Path, version: int, keep: int) -> None:
        """Copy a checkpoint of `directory`, unless it has a whole copy. Delete all older copies but
        the newest `keep`, and halves of copies that are older than those. Raises CheckpointError.
        """
        source = checkpoints.path_of(directory, version)
        with self._errors(f"cannot take version {version}"):
            files, root = self._open()
            target = f"{root}/{source.name}"
            position = f"{target}/{POSITION}"
            whole = files.cat_file(position) if files.exists(position) else b""
            if whole != (source / POSITION).read_bytes():
                _copy(files, source, target)
        kept = [known for known in self.versions() if known <= version][-keep:]
        with self._errors("cannot be pruned"):
            for old in _begun(files, root):
                if old < min(kept, default=0):
                    _delete(files, f"{root}/{checkpoints.version_name(old)}")

    def fetch_newest(self, directory: Path, announced: int) -> None:
        """Bring the newest copy of an announced version into `directory`, unless that has a
        checkpoint as new. Raises CheckpointError.
        """
        copied = [version for version in self.versions() if version <= announced]
        own = [version for version in checkpoints.versions(directory) if version <= announced]
        if not copied or (own and own[-1] >= copied[-1]):
            return
        final = checkpoints.path_of(directory, copied[-1])
        temporary = directory / FETCHED
        with self._errors(f"cannot give version {copied[-1]}"):
            files, root = self._open()
            shutil.rmtree(temporary, ignore_errors=True)
            source = f"{root}/{final.name}"
            for place in files.find(source):
                name = PurePosixPath(files._strip_protocol(place)).relative_to(source)
                if ".." in name.parts:
                    raise ValueError(f"{place} is not below {source}")
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(place, str(temporary / name))
            temporary.rename(final)
        logger.info("checkpoint of version %d: taken from %s", copied[-1], self.uri)

    def _open(self) -> tuple[Any, str]:
        """The file system, and the path of the copies in it."""
        files, root = url_to_fs(self.uri)
        files.invalidate_cache()
        return files, str(root).rstrip("/")

    @contextmanager
    def _errors(self, what: str) -> Generator[None]:
        """Whatever a file system raises is a CheckpointError."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"learner.checkpoint_copies: {self.uri} {what} ({describe_error(error, 1_000)})"
            ) from None


def _listed(files: Any, root: str) -> list[str]:
    try:
        return list(files.ls(root, detail=False))
    except FileNotFoundError:
        return []


def _begun(files: Any, root: str) -> list[int]:
    """Versions that have a copy or a part of one, oldest first."""
    names = [PurePosixPath(place).name for place in _listed(files, root)]
    return sorted(int(name) for name in names if NAME.fullmatch(name))


def _copy(files: Any, source: Path, target: str) -> None:
    """Copy a checkpoint, its position last."""
    _delete(files, target)
    names = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    for name in sorted(names, key=lambda name: (name == Path(POSITION), name)):
        place = f"{target}/{name.as_posix()}"
        files.makedirs(place.rpartition("/")[0], exist_ok=True)
        files.put_file(str(source / name), place)


def _delete(files: Any, target: str) -> None:
    """Delete a copy. Its position goes first, so that an interrupted deletion leaves none."""
    if files.exists(f"{target}/{POSITION}"):
        files.rm_file(f"{target}/{POSITION}")
    if files.exists(target):
        files.rm(target, recursive=True)
