"""Directories that appear only when they are complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.system.errors import ExportError


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory for the block to write to. It becomes `directory` if the block
    succeeds, and is removed otherwise.

    Raises ExportError if `directory` exists and is not an empty directory.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ExportError(
            f"{directory} exists and is not an empty directory; give another one, or remove it"
        )
    temporary = directory.absolute().with_name(f".{directory.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)  # A process that was killed may have left it.
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
