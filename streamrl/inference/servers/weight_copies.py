"""The copies of weights that one vLLM reads: pulled from the stores, and verified."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from itertools import count
from pathlib import Path
from typing import NamedTuple

from streamrl.config.run_file import RunFile
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import WeightError
from streamrl.weights.pull import pull


class VersionCopies(NamedTuple):
    """The directories of a version and of what vLLM needs before it."""

    weights: Path  # of the version
    check: Path | None  # None: the version is a whole model, or its check has been passed
    base: Path | None  # None: the version is a whole model, or vLLM has its base


class WeightCopies:
    """The copies in one directory, which is emptied first. Several threads may pull, each for
    another run.
    """

    def __init__(self, run: RunFile, directory: Path) -> None:
        self._run = run
        self._directory = directory
        self._pulls = count(1)  # numbers the copies of adapters
        # An earlier process of this identity may have left copies.
        shutil.rmtree(directory, ignore_errors=True)

    def pull_version(
        self, version: PolicyVersion, guest: str, with_check: bool, with_base: bool
    ) -> VersionCopies:
        """Copy a version and, of an adapter, its check and base where they are asked for. `guest`:
        the run whose version it is, or "" for this run's.

        Raises WeightError if one of them is not as it was announced, or cannot be copied. No copy
        of the version is left then.
        """
        place = self._directory_of(guest)
        store = self._store_of(guest)
        base = version.base
        name = str(version.version)
        if base is not None:
            # vLLM may still read an earlier copy of an adapter, so each has its own directory.
            name += f"-{next(self._pulls)}"
        copies = VersionCopies(
            weights=place / name,
            check=place / "check" if base and with_check else None,
            base=place / "base" if base and with_base else None,
        )
        pull(version, store, copies.weights, link=True)
        try:
            # The base comes last: it is the largest, and of no use without the others.
            if base and copies.check:
                pull(base.check, store, copies.check, link=True)
            if base and copies.base:
                pull(base, store, copies.base, link=True)
        except WeightError:
            self.delete(copies.weights)
            raise
        return copies

    def delete(self, directory: Path) -> None:
        """Delete a copy."""
        shutil.rmtree(directory, ignore_errors=True)

    def delete_all_but(self, kept: Collection[Path]) -> None:
        """Delete this run's copies but those in `kept`."""
        for copy in self._directory_of("").iterdir():
            if copy not in kept:
                self.delete(copy)

    def _directory_of(self, guest: str) -> Path:
        """The directory of a guest's copies, or of this run's. They are separate, because a run may
        have any name.
        """
        return self._directory / "guests" / guest if guest else self._directory / "own"

    def _store_of(self, guest: str) -> str:
        """The store of this run, or of the guest: they differ in the run's name alone."""
        return self._run.model_copy(update={"run": guest}).store if guest else self._run.store
