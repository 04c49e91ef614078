"""Finds every process that a test has caused, whoever started it and wherever it has gone, by a
mark in its environment.
"""

from __future__ import annotations

import time

import psutil

from tests.support.waiting import patience

# In the environment of everything that a test starts. vLLM is given few variables
# (`secrets.inheritable_environment`), and those that begin with XDG_ are among them.
MARK = "XDG_STREAMRL_TEST_MARK"


def is_marked(process: psutil.Process, mark: str) -> bool:
    """Whether the process is alive and carries this mark."""
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # it has ended meanwhile, or belongs to another user
        return False


def marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if is_marked(process, mark)]


def left_after(mark: str, limit_s: float = 30.0) -> list[psutil.Process]:
    """Those that are still there after `limit_s`; sooner when none is."""
    deadline = time.monotonic() + patience(limit_s)
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
