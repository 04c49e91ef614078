"""Keeps a process that has secrets closed to other processes of its user."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4  # linux/prctl.h


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory and environment, and from
    tracing it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
