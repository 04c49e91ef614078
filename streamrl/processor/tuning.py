"""What a process that moves megabytes a second tells the collector, the C library and the kernel
once, when it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os

YOUNG_OBJECTS = 50_000  # collected together: by default 700, which is less than one poll makes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
MMAP_BYTES = 32 << 20  # the most that glibc takes
TRIM_BYTES = 256 << 20


def settle_in() -> None:
    """Collect garbage seldom, keep the memory of messages for the next ones, and let others finish
    what they are at.

    Messages and records have no cycles: reference counts free them, and a collection only walks
    over what is held. A message of 200 KB or more would otherwise be mapped anew each time, and its
    pages touched for the first time cost more than the copying (measured: encoding a batch of 128
    rollouts 6 us a rollout instead of 0.3). Where there is no glibc that does nothing. A process
    that does not interrupt others when a message comes for it costs them and itself less of the
    processor's cache (measured, two cores shared with the broker: a tenth of everybody's CPU, no
    latency).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
    if hasattr(os, "SCHED_BATCH"):  # on Linux
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
