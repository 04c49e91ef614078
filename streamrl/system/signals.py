"""How a process is told to stop: a signal sets an event.

Python runs a handler in the main thread, between any two of its steps. One of them may hold the
event's own lock, so another thread sets it. And the kernel may hand a signal to any thread, the one
that just starts first of all: a main thread that waits without a time limit would not hear of it.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterable


def stop_on(
    signals: Iterable[int], note: Callable[[int], None] = lambda number: None
) -> threading.Event:
    """The event that any of them sets, from now on. `note` is told which one came, in the main
    thread, and may raise instead.
    """
    stop = threading.Event()

    def handle(number: int, _: object) -> None:
        note(number)
        if not stop.is_set():
            _thread.start_new_thread(stop.set, ())

    for number in signals:
        signal.signal(number, handle)
    return stop
