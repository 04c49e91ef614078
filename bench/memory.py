"""Memory that is there. The host of a virtual machine may take back what is free, and then the
first touch of a page costs up to ten times as much as filling it does: whoever writes a log to such
memory measures the host.
"""

from __future__ import annotations

from pathlib import Path

import psutil

SPARE_BYTES = 1 << 30  # left free
MOST_BYTES = 32 << 30  # a bench writes less
CHUNK_BYTES = 4 << 20


def fill_page_cache(directory: Path, most_bytes: int = MOST_BYTES) -> int:
    """Have the kernel's page cache take what is free, as on a machine that has run for a while.
    Returns the bytes read.

    A file of nothing in `directory` is read. Its pages are the first that the kernel gives to
    somebody else. They go with the file, which has to stay while something is measured.
    """
    size = min(psutil.virtual_memory().free - SPARE_BYTES, most_bytes)
    if size <= 0:
        return 0
    path = directory / f"nothing-{len(list(directory.glob('nothing-*')))}"
    with path.open("wb") as file:
        file.truncate(size)
    chunk = bytearray(CHUNK_BYTES)
    done = 0
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(chunk):
            done += read
    return done
