"""Signs of life that a test gives beside what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], object], every_s: float) -> Iterator[None]:
    """Do `work` at once, and again every `every_s`, in a thread for as long as the block lasts."""
    over = threading.Event()

    def repeat() -> None:
        work()
        while not over.wait(every_s):
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
