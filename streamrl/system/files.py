"""Files that other processes read while they are written."""

from __future__ import annotations

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


def shipped_directory(installed: str, source: str) -> Path:
    """The directory of files that come with streamrl. They are the package's `installed` where
    streamrl is installed from a wheel, and `source`, from the root of the repository, elsewhere.
    """
    package = Path(__file__).parents[1]
    directory = package / installed
    return directory if directory.is_dir() else package.parent / source
