"""Until something is so."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
