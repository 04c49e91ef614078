"""The weight store: versions as directories under any fsspec URI. A version is written under a
temporary name, verified and renamed, and then announced by its URI, size and hash (claim check).

A directory's name ends with the beginning of its hash, so two results of one version (by a learner
that was taken for dead, or of a new lineage) are next to each other, and what was announced is
never replaced.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Container, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from streamrl.system.errors import WeightError
from streamrl.weights.files import (
    as_weight_error,
    describe,
    differences_at,
    is_local,
    open_store,
    read_manifest,
    verify,
)
from streamrl.weights.manifest import (
    MANIFEST,
    Manifest,
    StoredWeights,
    WeightRef,
    to_bytes,
)

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
VERSION_NAME = re.compile(r"v(\d{6,})-[0-9a-f]{16}")


def version_name(version: int) -> str:
    """v000012: names sort in the order of versions."""
    return f"v{version:06d}"


def pinned_for_eval(newest: int, keep: int, every: int) -> set[int]:
    """The last `keep` of the versions up to `newest` that `every` divides, which the evaluator may
    still need. Empty if `every` is 0.
    """
    return {
        version
        for version in range(newest, max(newest - keep * every, -1), -1)
        if version % every == 0
    }


class Store:
    """The versions of one learner under `root`, a directory URI. All errors are WeightErrors."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._fs, self._path = open_store(self.root)

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

    def holds(self, version: StoredWeights) -> bool:
        """Whether the announced version is in this store, with the announced contents and nothing
        that is no weights. All of it is read.

        Raises WeightError if that cannot be determined.
        """
        if not version.uri.startswith(f"{self.root}/"):
            return False
        path = open_store(version.uri)[1]
        if not as_weight_error(
            lambda: self._fs.exists(f"{path}/{MANIFEST}"), f"the weight store {self.root}"
        ):
            return False
        try:
            manifest = read_manifest(self._fs, path)
        except WeightError:
            return False
        return manifest.sha256 == version.sha256 and not differences_at(self._fs, path, manifest)

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

        by_version = dict[int, list[str]]()
        for path in as_weight_error(listed, f"the weight store {self.root} cannot be listed"):
            name = str(path).rstrip("/").rpartition("/")[2]
            if match := VERSION_NAME.fullmatch(name):
                by_version.setdefault(int(match[1]), []).append(name)
        return by_version

    def prune(self, newest: int, keep: int, keep_also: Container[int] = ()) -> None:
        """Delete all versions up to `newest` except the last `keep` and those in `keep_also`. Later
        versions stay: they will be written again. Raises WeightError.
        """
        for version, names in self._names().items():
            if version <= newest - keep and version not in keep_also:
                for name in names:
                    as_weight_error(
                        partial(self._remove, f"{self._path}/{name}"),
                        f"{name} cannot be deleted from the weight store {self.root}",
                    )

    @contextmanager
    def _removed_after(self, path: str) -> Generator[None]:
        """Remove `path` at the end of the block."""
        try:
            yield
        finally:
            with suppress(Exception):  # it is only room, and the earlier error tells more
                self._remove(path)

    def _remove(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    @contextmanager
    def _scratch(self, temporary: str) -> Generator[Path]:
        """The directory that a version is first written to. If the store is a directory of this
        machine, it is in the store itself.
        """
        if is_local(self._fs):
            Path(temporary).mkdir(parents=True)
            yield Path(temporary)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)

    def _publish(self, directory: Path, temporary: str, name: str) -> Manifest:
        manifest = describe(directory)
        (directory / MANIFEST).write_bytes(to_bytes(manifest))
        final = f"{self._path}/{_directory(name, manifest.sha256)}"
        as_weight_error(
            lambda: self._move(directory, temporary, final, manifest),
            f"{name} could not be written to the weight store {self.root}",
        )
        return manifest

    def _move(self, directory: Path, temporary: str, final: str, manifest: Manifest) -> None:
        if not is_local(self._fs):
            self._fs.put(f"{directory}/", f"{temporary}/", recursive=True)
            verify(self._fs, temporary, manifest, final)
        if self._fs.exists(final):
            is_whole = not differences_at(self._fs, final, manifest)
            if is_whole and self._fs.exists(f"{final}/{MANIFEST}"):
                return  # the same bytes, written before
            self._remove(final)  # damaged
        self._fs.mv(temporary, final, recursive=True)

    def _write_error(self, name: str, size_bytes: int, error: OSError) -> WeightError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = (
                f", {shutil.disk_usage(_existing(Path(self._path))).free} are free"
                if is_local(self._fs)
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


def _existing(path: Path) -> Path:
    """The nearest parent directory that exists."""
    return next(place for place in (path, *path.parents) if place.exists())
