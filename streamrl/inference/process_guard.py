"""Runs a command that ends with its owner: `python process_guard.py GRACE_S COMMAND...`, with a
pipe from the owner as stdin.

vLLM is a tree of processes, and its engine survives a kill of the API server, so a parent-death
signal to the API server is not enough. The owner holds the only write end of the pipe. When the
owner closes it or dies, this process reads end-of-file and ends the whole session of the command:
it sends SIGTERM to the command, and SIGKILL to everything that is left after GRACE_S seconds. It
exits with the command's status. It uses the standard library only, runs as a plain file, and starts
in about 20 ms.
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


def run_until_owner_dies(command: list[str], grace_s: float) -> int:
    """Run `command` in a session of its own until it ends or stdin does. All processes of the
    session have ended when this returns.

    Returns the exit status of the command, or 128 + n if signal n has ended it.
    """
    if hasattr(os, "SCHED_OTHER"):
        # The agent runs as SCHED_BATCH (`processor/tuning.py`), but a server must answer at once.
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
    """Wait up to POLL_S for the pipe to end. Nothing is ever written to it."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
    return bool(readable) and os.read(sys.stdin.fileno(), 1) == b""


def _kill_session(leader: subprocess.Popen[bytes], attempts: int = 500) -> None:
    """Send SIGKILL until the command's process group is empty. One signal is not enough, because a
    member may just be starting another process.
    """
    for _ in range(attempts):
        try:
            os.killpg(leader.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # The group is empty. On macOS, PermissionError says that only zombies are left.
            return
        leader.poll()  # This removes the leader if it is a zombie, which counts as a member.
        time.sleep(0.01)


if __name__ == "__main__":
    # A signal to the process group of the owner must not end this process: only the end of the pipe
    # does.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(run_until_owner_dies(sys.argv[2:], float(sys.argv[1])))
