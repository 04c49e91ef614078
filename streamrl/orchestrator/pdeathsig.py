"""Runs a command that dies with its parent, however the parent ends: `python pdeathsig.py PARENT
COMMAND...`.

It asks the kernel for a SIGKILL at the parent's end and then becomes the command by `exec`. Linux
sends that signal when the *thread* that started the process ends, so the supervisor starts parts
from its main thread. The file imports the standard library only, because it runs as a plain file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, or exit now if it has ended already.

    Does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent has ended between the fork and the call
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
