"""Whose file it is: a program, or a library, is run from a place found by itself only if nobody
else can have put it there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_ours(path: Path) -> bool:
    """Does it belong to this user or to root, and may nobody else write to it? A group of the
    user's own does not count as somebody else.
    """
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_uid not in (os.getuid(), 0):
        return False
    of_others = stat.S_IWOTH | (0 if found.st_gid == os.getgid() else stat.S_IWGRP)
    return not found.st_mode & of_others
