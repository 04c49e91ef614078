"""How long a test waits, and for what: for an event, never for a time. A limit is what a wait that
fails costs, so it may be ample.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FACTOR = float(os.environ.get("STREAMRL_PATIENCE") or 1)  # of a machine that is slow or busy


def patience(seconds: float) -> float:
    """The limit that a wait of `seconds` on an idle machine has on this one."""
    return seconds * FACTOR


def until(
    true: Callable[[], T],
    limit_s: float = 30.0,
    otherwise: Callable[[], object] | str = "it did not come",
    every_s: float = 0.02,
) -> T:
    """Waits until `true()` is, and returns what it gave. Fails with what `otherwise` says after
    `patience(limit_s)`.
    """
    deadline = time.monotonic() + patience(limit_s)
    while not (found := true()):
        assert time.monotonic() < deadline, (
            f"not within {patience(limit_s):g} s:"
            f" {otherwise() if callable(otherwise) else otherwise}"
        )
        time.sleep(every_s)
    return found


async def eventually(true: Callable[[], T], limit_s: float = 30.0) -> T:
    """Waits until `true()` is, while the other tasks of the event loop run, and returns what it
    gave. Fails after `patience(limit_s)`.
    """
    deadline = time.monotonic() + patience(limit_s)
    while not (found := true()):
        assert time.monotonic() < deadline, f"not within {patience(limit_s):g} s"
        await asyncio.sleep(0)
    return found
