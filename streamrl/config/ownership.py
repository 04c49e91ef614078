"""Checks that no other user could have written a program or library that is found by searching."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_ours(path: Path) -> bool:
    """Whether the file belongs to this user or to root, and no other user may write to it. The
    user's own group may.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_uid not in (os.getuid(), 0):
        return False
    writable_by_others = stat.S_IWOTH | (0 if status.st_gid == os.getgid() else stat.S_IWGRP)
    return not status.st_mode & writable_by_others
