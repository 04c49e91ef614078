"""Kills what the parts of a run have started, once their supervisor has ended.

It runs as `python orphan_reaper.py TOKEN` with a pipe from the supervisor as stdin. A part dies
with the supervisor (`pdeathsig.py`), but what the part has started, such as an env's sandboxes or
vLLM, does not. Every such process carries the supervisor's token in its environment, whatever its
session. A process that renames itself, as vLLM's engine does, overwrites its environment; it is
found by its process group. When the pipe ends, because the supervisor closed it or died, all of
them are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import psutil

RUN_TOKEN = "STREAMRL_SUPERVISOR"  # an environment variable
ROUNDS = 50  # a process that is found may just be starting another one


def kill_tagged(token: str) -> None:
    """Send SIGKILL to all other processes with this token and to their groups until none is left."""
    groups: set[int] = set()
    for _ in range(ROUNDS):
        left = tagged_processes(token)
        for process in left:
            group = group_of(process)
            if group is not None and group != os.getpgrp():
                groups.add(group)
        alive = [kill_group(group) for group in groups]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not left and not any(alive):
            return
        time.sleep(0.02)


def group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def kill_group(group: int) -> bool:
    """Send SIGKILL to a process group. Returns whether there was still a process in it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def tagged_processes(token: str) -> list[psutil.Process]:
    """The living processes that carry the token."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(RUN_TOKEN) == token
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):  # it has ended meanwhile, or belongs to another user
            continue
    return found


if __name__ == "__main__":
    # Only the supervisor ends this process, through the pipe.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_tagged(sys.argv[1])
