"""Finds every process that a test has caused, whoever started it and wherever it has gone, by a
mark in its environment.
"""

from __future__ import annotations

import time

import psutil

from tests.support.waiting import patience

MARK = "STREAMRL_TEST_MARK"


def marked(mark: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone, or not ours
            continue
    return found


def left_after(mark: str, limit_s: float) -> list[psutil.Process]:
    """Those that are still there after `limit_s`; sooner when none is."""
    deadline = time.monotonic() + patience(limit_s)
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
