"""The copies of weights that one vLLM reads: pulled from the stores, verified, and deleted."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import NamedTuple

from streamrl.config.run_file import RunFile
from streamrl.records import PolicyVersion
from streamrl.weights.pull import pull


class VersionCopies(NamedTuple):
    """The directories of a version and of what vLLM needs before it."""

    version: Path
    base: Path | None  # None: the version is a whole model, or vLLM has its base
    check: Path | None  # None: the version is a whole model, or its check has been passed


class WeightCopies:
    """The copies in one directory. Several threads may pull, each for a run of its own."""

    def __init__(self, run: RunFile, directory: Path) -> None:
        self._run = run
        self._directory = directory
        self._pulls = count(1)  # numbers the copies of adapters
        # An earlier process of this identity may have left copies.
        shutil.rmtree(directory, ignore_errors=True)

    def pull_version(
        self, version: PolicyVersion, guest: str, with_base: bool, with_check: bool
    ) -> VersionCopies:
        """Copy a version, and its base and check if they are asked for and it has some. `guest`:
        the run whose version it is, or "" for this run's.

        Raises WeightError for what is not as it was announced.
        """
        place = self._directory_of(guest)
        store = self._store_of(guest)
        base = version.base
        name = str(version.version)
        if base is not None:
            # vLLM may still read an earlier copy of an adapter, so each has a directory of its own.
            name += f"-{next(self._pulls)}"
        copies = VersionCopies(
            version=place / name,
            base=place / "base" if base and with_base else None,
            check=place / "check" if base and with_check else None,
        )
        pull(version, store, copies.version, link=True)
        if base and copies.base:
            pull(base, store, copies.base, link=True)
        if base and copies.check:
            pull(base.check, store, copies.check, link=True)
        return copies

    def delete_all_but(self, directory: Path) -> None:
        """Delete this run's copies of whole models but `directory` and the oldest, which vLLM was
        started on: it reads its tokenizer from there.
        """
        copies = self._directory_of("").iterdir()
        for copy in sorted(copies, key=lambda path: path.stat().st_mtime)[1:]:
            if copy != directory:
                shutil.rmtree(copy, ignore_errors=True)

    def _directory_of(self, guest: str) -> Path:
        """Guests' copies lie apart from this run's: a run may have any name."""
        return self._directory / "guests" / guest if guest else self._directory / "own"

    def _store_of(self, guest: str) -> str:
        """The store of this run, or of the guest: they differ in the run's name alone."""
        return self._run.model_copy(update={"run": guest}).store if guest else self._run.store
