"""The disk under the weight store: a small one of its own where one may be mounted; elsewhere the
learner writes to /dev/full while it is full.
"""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

SIZE_MIB = 16
FULL = "full"  # file in the run's directory, for where nothing can be mounted
BALLAST = "ballast"


class Disk:
    """Mounted at `path` of a run's directory as long as the soak lasts. Either way it is the kernel
    that says ENOSPC.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._flag = path.parent / FULL
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(path)]
        self.own = subprocess.run(command, capture_output=True).returncode == 0

    def fill(self) -> None:
        """Nothing can be written now. What is deleted later makes room again."""
        if not self.own:
            self._flag.touch()
            return
        try:
            with (self._path / BALLAST).open("ab", buffering=0) as ballast:
                while ballast.write(bytes(1 << 16)):
                    pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def clear(self) -> None:
        """There is space again."""
        (self._path / BALLAST).unlink(missing_ok=True)
        self._flag.unlink(missing_ok=True)

    def close(self) -> None:
        if self.own:
            subprocess.run(["umount", "--lazy", str(self._path)], check=True)


def is_full(flag: Path) -> bool:
    return flag.exists()
