"""How several processes of a learner write a model together. Each writes its own files into a
directory that all processes see. The shards of these files that others have, it finds in a second
directory, next to that one. If the model belongs in another directory, rank zero writes its own
files there and links or copies the others'.

A file is written by one process as a whole, because on a network file system two machines that
write to one file may overwrite what the other has written next to it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from streamrl.learner.files.checkpoints import TEMPORARY, WRITE_TIMEOUT_S
from streamrl.learner.files.weight_shards import LocalWeights
from streamrl.learner.parallel.distributed import (
    forget_reports,
    report,
    shared_token,
    wait_for_report,
)
from streamrl.system.errors import WeightError, describe_error
from streamrl.weights.store import version_name

DONE = "done"


class StagedFiles(NamedTuple):
    """The files of one model that all processes write together. Any thread of a process may call
    these methods while another one trains.
    """

    directory: Path  # All processes see it.
    weights: LocalWeights

    @property
    def shards(self) -> Path:
        """The directory of the shards that processes exchange."""
        return shards_beside(self.directory)

    @property
    def _name(self) -> str:
        """The directory's name and its parent's. A process gives each directory another one."""
        return "/".join(self.directory.parts[-2:])

    def exchange_shards(self) -> None:
        """Write this process's shards of the others' files, and wait for the others' shards of its
        own files. Raises WeightError.
        """
        if self.weights.processes == 1:
            return
        name = f"{self._name}/shards"
        with self._reported(name):
            self.weights.write_shards(self.shards)
        for holder in self.weights.holders_for(self.weights.process):
            _wait_for(name, holder)

    def write_all_files(self) -> None:
        """Write all files to the directory, in all processes together. When rank zero returns, all
        are there. Raises WeightError and OSError.
        """
        if self.weights.process != 0:
            self.stage_own_files()
            return
        self.exchange_shards()
        self.weights.write_files(self.directory, self.shards)
        self._wait_for_others()
        self._remove_shards()

    def stage_own_files(self) -> None:
        """Write the files of this process, which is not rank zero, to the directory, and tell rank
        zero. Raises WeightError.
        """
        with self._reported(f"{self._name}/files"):
            self.exchange_shards()
            self.weights.write_files(self.directory, self.shards)

    def gather_files(self, into: Path) -> None:
        """Wait in rank zero for the files of all others, and put them into another directory.
        Raises WeightError for a process that could not write its own, and OSError.
        """
        for file in self._wait_for_others():
            _link_or_copy(self.directory / file, into / file)

    def _wait_for_others(self) -> list[str]:
        """Wait for the files of all others. Returns their names."""
        files = list[str]()
        for process in range(1, self.weights.processes):
            _wait_for(f"{self._name}/files", process)
            files += self.weights.files_of(process)
        return files

    def remove(self) -> None:
        """Remove the directories, once rank zero has gathered the files."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._remove_shards()

    def _remove_shards(self) -> None:
        shutil.rmtree(self.shards, ignore_errors=True)
        if self.weights.processes > 1:
            forget_reports(self._name)

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Report to the other processes how the block ended, whatever it raises: they wait for it.
        Raises WeightError.
        """
        try:
            yield
        except WeightError as error:
            report(name, str(error))
            raise
        except Exception as error:  # Such as MemoryError, or an error of safetensors.
            failure = self._failure(error)
            report(name, failure)
            raise WeightError(failure) from None
        report(name, DONE)

    def _failure(self, error: Exception) -> str:
        hint = "; free some space in the directory of the run" if isinstance(error, OSError) else ""
        return f"{self.directory} cannot be written ({describe_error(error)}){hint}"


def _wait_for(what: str, process: int) -> None:
    outcome = wait_for_report(what, process, WRITE_TIMEOUT_S)
    if outcome != DONE:
        raise WeightError(outcome)


def shards_beside(directory: Path) -> Path:
    """The directory of the shards of the files in a directory."""
    return directory.with_name(f"{directory.name}-shards")


def staging_directory(checkpoints: Path, version: int) -> Path:
    """The directory for the files of a version. It is next to the learner's checkpoints, and what
    a learner that was killed has left there is removed when it starts again. The first call is
    collective.
    """
    return checkpoints / f"{TEMPORARY}{version_name(version)}-{shared_token()}"


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # It is another file system, or one without links.
        shutil.copyfile(source, target)
