"""Signs of life that a test gives beside what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], object], every_s: float) -> Iterator[None]:
    """Do `work` at once, and again every `every_s`, in a thread for as long as the block lasts.
    What it raises is raised after the block.
    """
    over = threading.Event()

    def repeat() -> None:
        work()
        while not over.wait(every_s):
            work()

    with ThreadPoolExecutor(1) as pool:
        repeated = pool.submit(repeat)
        try:
            yield
        finally:
            over.set()
        repeated.result()
