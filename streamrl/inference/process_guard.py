"""Runs a command that does not outlive whoever started it: `python leash.py GRACE_S COMMAND...`,
with a pipe from the owner as stdin.

vLLM is a tree of processes, and its engine stays when the API server is killed, so a parent-death
signal on the API server is not enough. The owner holds the only write end of the pipe; when it
closes it, or dies in whatever way, end of file is read here and the whole session of the command
goes: SIGTERM to the command, and after GRACE_S seconds SIGKILL to all that is left. Exits as the
command did. Standard library only: it runs as a plain file, and is up in some 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

POLL_S = 0.1


def hold(command: list[str], grace_s: float) -> int:
    """Run `command` in a session of its own until it ends or stdin does; nothing of that session is
    left when this returns.
    """
    if hasattr(os, "SCHED_OTHER"):  # a server answers at once, however its agent is scheduled
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None and not _owner_is_gone():
            pass
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
    finally:
        _kill_session(child)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _owner_is_gone() -> bool:
    """Waits POLL_S for the pipe to end; nothing is ever written to it."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
    return bool(readable) and os.read(sys.stdin.fileno(), 1) == b""


def _kill_session(leader: subprocess.Popen[bytes], attempts: int = 500) -> None:
    """SIGKILL until the process group that the command led is empty: a member may be starting
    another one.
    """
    for _ in range(attempts):
        try:
            os.killpg(leader.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nobody there; on macOS, only zombies
            return
        leader.poll()  # a zombie counts as a member
        time.sleep(0.01)


if __name__ == "__main__":
    # the owner decides, through the pipe
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(hold(sys.argv[2:], float(sys.argv[1])))
