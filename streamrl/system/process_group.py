"""Processes that end with the one that started them, however that one ends.

This file runs as a program before or next to them. It imports the standard library at its start, so
it is there in about 20 ms, and becomes or starts any command. Each of the three functions gives a
command line:

- `with_parent` is for one process: the kernel kills it at its parent's end (Linux).
- `guarded` is for a command that leaves processes running if only its first one is killed, as vLLM
  does: its whole session ends with its owner.
- `reaper` is for what the parts of a run have started, in whatever session: it is found by a token
  in its environment.

The last two read from a pipe whose only write end the owner holds, and to which nothing is ever
written. They see its end when the owner closes it or dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RUN_TOKEN = "STREAMRL_SUPERVISOR"  # the environment variable by which `reaper` finds processes
POLL_S = 0.1
ROUNDS = 50  # a process that is found may just be starting another one


def with_parent(command: Sequence[str]) -> list[str]:
    """The command line of a process that dies with this one.

    Linux kills it when the *thread* that started it ends; elsewhere it lives on. Where a
    process is recognised by its command line from the first moment, `set_pdeathsig` is used.
    """
    return [sys.executable, "-S", "-E", __file__, "with-parent", str(os.getpid()), *command]


def guarded(command: Sequence[str], grace_s: float, descriptor: int = -1) -> list[str]:
    """The command line of a guard of this command, to be started with a pipe as stdin.

    At the end of the pipe the command gets SIGTERM, and after `grace_s` all that is left of its
    session gets SIGKILL. The guard exits with the command's status. A `descriptor` that the guard
    is started with is the command's: the guard keeps no copy.
    """
    return [sys.executable, __file__, "guarded", f"{grace_s},{descriptor}", *command]


def reaper(token: str) -> list[str]:
    """The command line of a process that kills, when its stdin ends, all others that have this
    token as RUN_TOKEN in their environment.

    A process that renames itself, as vLLM's engine does, overwrites its environment; it is found by
    its process group.
    """
    return [sys.executable, __file__, "reaper", token]


def set_pdeathsig(parent: int) -> Callable[[], None]:
    """A function that a process calls before it becomes another program, so that the kernel kills
    it when the thread that started it ends. It exits at once if its parent has ended already.

    The function does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return lambda: None
    # Looked up before the fork: the child of a process with threads may do very little.
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:  # it ended between the fork and the call
            os._exit(1)

    return before_exec


def run_until_owner_dies(command: Sequence[str], grace_s: float, descriptor: int = -1) -> int:
    """Run `command` in its own session until it ends or stdin does, and hand it a descriptor, if
    there is one. Nothing of the session is left when this returns.
    """
    handed = (descriptor,) if descriptor >= 0 else ()
    if hasattr(os, "SCHED_OTHER"):  # a server answers at once, however its agent is scheduled
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=handed
    )
    for number in handed:
        os.close(number)
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
    """Wait up to POLL_S for the pipe to end."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
    return bool(readable) and os.read(sys.stdin.fileno(), 1) == b""


def _kill_session(leader: subprocess.Popen[bytes], attempts: int = 500) -> None:
    """Send SIGKILL until the command's process group is empty, because a member may be starting
    another process.
    """
    for _ in range(attempts):
        if not kill_group(leader.pid):
            return
        leader.poll()  # a zombie counts as a member
        time.sleep(0.01)


def kill_tagged(token: str) -> None:
    """Send SIGKILL to all other processes with this token, and their groups, until none is left."""
    import psutil

    groups: set[int] = set()
    for _ in range(ROUNDS):
        left = tagged_processes(token)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(process.pid))
        groups.discard(os.getpgrp())
        alive = [kill_group(group) for group in groups]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not left and not any(alive):
            return
        time.sleep(0.02)


def tagged_processes(token: str) -> list[psutil.Process]:
    """The living processes that carry the token."""
    import psutil

    tagged: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(RUN_TOKEN) == token
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                tagged.append(process)
        except (psutil.Error, OSError):  # it has ended meanwhile, or belongs to another user
            continue
    return tagged


def kill_group(group: int) -> bool:
    """Send SIGKILL to a process group. Returns whether there was still a process in it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # none there; on macOS, only zombies
        return False
    return True


def main(form: str, argument: str, *command: str) -> int:
    if form == "with-parent":
        set_pdeathsig(int(argument))()
        os.execvp(command[0], command)
    # Only the owner ends this process, through the pipe.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if form == "guarded":
        grace_s, descriptor = argument.split(",")
        return run_until_owner_dies(command, float(grace_s), int(descriptor))
    sys.stdin.buffer.read()
    kill_tagged(argument)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
