"""Settings of the garbage collector, the C library and the kernel for a process that moves
megabytes a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os

# Objects between two collections. The default of 700 is less than one poll makes.
YOUNG_OBJECTS = 50_000
# Parameters of mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_BYTES = 32 << 20  # the most that glibc takes
TRIM_BYTES = 256 << 20
ARRAY_BYTES = 4 << 20  # a tensor of a layer, where a model is large enough to matter


def tune_process() -> None:
    """Call this once, when a process starts.

    - Garbage is collected seldom, and not among what the process has at its start.
    - glibc keeps the memory of large messages for the next ones. By default a message of 200 KB or
      more is mapped anew each time, and touching its pages for the first time costs more than the
      copying (measured in turns: encoding and decoding a batch of 128 rollouts of 1,024 tokens
      takes 2.0 us a rollout instead of 1.3; on a host that takes free memory back, encoding took 6
      us instead of 0.3). Without glibc this does nothing.
    - The process does not interrupt others when a message comes for it, which would cost them and
      itself a part of the CPU's cache (measured, two cores shared with the broker: a tenth of
      everybody's CPU, no latency).
    """
    gc.collect()
    gc.freeze()
    collect_seldom()
    keep_freed_memory(MMAP_BYTES, TRIM_BYTES)
    if hasattr(os, "SCHED_BATCH"):  # on Linux
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def collect_seldom() -> None:
    """Collect garbage seldom. Modules stay, and messages and records have no cycles: counts free
    them, and a collection only walks over what is held.
    """
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)


def return_freed_arrays() -> None:
    """Call this after `tune_process` in a process that holds a model. Memory of large arrays goes
    back to the system when they are freed.

    Otherwise glibc keeps what is freed after an export or a checkpoint, in pieces that the one
    large buffer of a training step cannot use: 4 GiB of 13 for a model of 0.6 billion parameters.
    Without glibc this does nothing.
    """
    keep_freed_memory(ARRAY_BYTES, ARRAY_BYTES)


def raise_descriptor_limit() -> int:
    """Allow this process as many descriptors as the system lets it have, and return their number. A
    shell allows 1,024, which a server of many connections uses up.
    """
    import resource  # Windows has no such limit, and runs no server

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """How many descriptors this process may have."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def keep_freed_memory(piece_bytes: int, heap_bytes: int) -> None:
    """Have glibc keep freed pieces smaller than `piece_bytes`, and so much at the heap's end."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, piece_bytes)
        mallopt(M_TRIM_THRESHOLD, heap_bytes)
