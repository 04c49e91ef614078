"""Files that several processes use at a time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from uuid import uuid4


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file so that a reader meanwhile sees all of the old or all of the new one.
    `mode` and the process's umask give the permissions of a new file.
    """
    # Machines that share a directory may write the same file.
    temporary = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    try:
        temporary.touch(mode)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_least_recently_used(directory: Path, kept_bytes: int) -> None:
    """Remove files from a directory until the others have at most `kept_bytes` bytes together.
    Those that were read and written longest ago go first.
    """
    used: list[tuple[float, int, Path]] = []
    for file in directory.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes files, too
            status = file.stat()
            used.append((max(status.st_atime, status.st_mtime), status.st_size, file))
    for _, size, file in sorted(used, reverse=True):
        kept_bytes -= size
        if kept_bytes < 0:
            file.unlink(missing_ok=True)


def shipped_directory(installed: str, source: str) -> Path:
    """The directory of files that come with streamrl. They are the package's `installed` where
    streamrl is installed from a wheel, and `source`, from the root of the repository, elsewhere.
    """
    package = Path(__file__).parents[1]
    directory = package / installed
    return directory if directory.is_dir() else package.parent / source
