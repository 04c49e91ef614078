"""How several processes of a learner write a model together. Into a directory that all processes
see, each writes its own files. A version may be wanted elsewhere: rank zero writes its files there,
and links or copies those of the others from the directory that all see.

A file is written by one process as a whole, because on a network file system two machines that
write to one file may overwrite what the other has written beside it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from streamrl.errors import WeightError, describe_error
from streamrl.learner.checkpoints import TEMPORARY, WRITE_TIMEOUT_S
from streamrl.learner.distributed import (
    is_rank_zero,
    report_to_rank_zero,
    shared_token,
    wait_for_report,
)
from streamrl.learner.export import files_of_process
from streamrl.weights.store import version_name

DONE = "done"


class StagedFiles(NamedTuple):
    """The files of one model that the other processes write for rank zero."""

    directory: Path  # All processes see it.
    files: Sequence[str]  # The names of all files of the model that have tensors.

    @property
    def _name(self) -> str:
        """The directory's name and its parent's. A process gives each directory another one."""
        return "/".join(self.directory.parts[-2:])

    def write(self, write_own: Callable[[Path], None]) -> None:
        """Write all files to the directory, in all processes together. When rank zero returns, all
        are there. `write_own`: as for `hand_over`. Raises WeightError and OSError.
        """
        if is_rank_zero():
            write_own(self.directory)
            self._wait_for_others()
        else:
            self.hand_over(write_own)

    def hand_over(self, write_own: Callable[[Path], None]) -> None:
        """Call `write_own` with the directory, in a process other than rank zero, which writes this
        process's files there, and tell rank zero. Raises WeightError.
        """
        if not files_of_process(self.files, jax.process_index(), jax.process_count()):
            return
        try:
            write_own(self.directory)
        except OSError as error:
            failure = (
                f"{self.directory} cannot be written ({describe_error(error)}); free some space in"
                " the directory of the run"
            )
            report_to_rank_zero(self._name, failure)
            raise WeightError(failure) from None
        report_to_rank_zero(self._name, DONE)

    def collect(self, directory: Path) -> None:
        """Wait in rank zero for the files of all others, and put them into another directory.
        Raises WeightError for a process that could not write its own, and OSError.
        """
        for file in self._wait_for_others():
            _link_or_copy(self.directory / file, directory / file)

    def _wait_for_others(self) -> list[str]:
        """Wait for the files of all others. Returns their names."""
        found = list[str]()
        for process in range(1, jax.process_count()):
            files = files_of_process(self.files, process, jax.process_count())
            if not files:
                break
            report = wait_for_report(self._name, process, WRITE_TIMEOUT_S)
            if report != DONE:
                raise WeightError(report)
            found += files
        return found

    def remove(self) -> None:
        """Remove the directory, once rank zero has collected the files."""
        shutil.rmtree(self.directory, ignore_errors=True)


def staging_directory(checkpoints: Path, version: int) -> Path:
    """The directory for the files of a version. It lies beside the learner's checkpoints, and what
    a learner that was killed has left there is removed when it starts again. The first call is
    collective.
    """
    return checkpoints / f"{TEMPORARY}{version_name(version)}-{shared_token()}"


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # It is another file system, or one without links.
        shutil.copyfile(source, target)
