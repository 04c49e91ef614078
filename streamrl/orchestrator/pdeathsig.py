"""Becomes a command that dies with the process that started it, even by SIGKILL: `python tether.py
PARENT COMMAND...`.

Asks the kernel for the signal and turns into the command (`exec`), so nothing runs in between and
no Python runs between fork and exec. Linux sends it when the *thread* that started the process
ends, so the supervisor starts parts from its main thread. Standard library only: it runs as a plain
file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tie_to(parent: int) -> None:
    """Have SIGKILL sent to this process when `parent` ends; leave at once if it has ended already.
    Elsewhere than on Linux: nothing.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended between the fork and the call
        os._exit(1)


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
