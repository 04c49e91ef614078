"""Outlives a supervisor just long enough to end what its parts have started: `python guardian.py
MARK`, with a pipe from the supervisor as stdin.

A part dies with the supervisor (`tether.py`), but not what the part has started: an env's
sandboxes, or vLLM. All of it carries the supervisor's mark in its environment, in whatever session
it is, or belongs to the process group of one that does: a process that renames itself, as vLLM's
engine does, overwrites its environment. When the pipe ends, because the supervisor closed it or
died, all of that is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil

MARK = "STREAMRL_SUPERVISOR"  # an environment variable
ROUNDS = 50  # what is found may be starting another one


def sweep(mark: str) -> None:
    """SIGKILL to every process with that mark but this one, and to their process groups, until
    there is none.
    """
    groups: set[int] = set()
    for _ in range(ROUNDS):
        left = marked(mark)
        groups |= {
            group for process in left if (group := group_of(process)) not in (None, os.getpgrp())
        }
        alive = [group for group in groups if kill_group(group)]
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        if not left and not alive:
            return
        time.sleep(0.02)


def group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def kill_group(group: int) -> bool:
    """SIGKILL to a process group; is there still anybody in it?"""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def marked(mark: str) -> list[psutil.Process]:
    """Processes that have the mark and are alive."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    return found


if __name__ == "__main__":
    # the supervisor decides, through the pipe
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
