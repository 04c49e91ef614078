"""A part in a thread of its own, over a log in memory: started, watched, stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.support.waiting import patience, until

PATIENCE_S = 60.0
LOOK_S = 0.01


def run_until(
    main: Callable[[threading.Event], object],
    reached: Callable[[], bool],
    timeout_s: float = PATIENCE_S,
) -> float:
    """Run `main` in a thread, and stop it as soon as `reached` holds. Returns the seconds that
    stopping took, and raises what `main` raised.
    """
    stop = threading.Event()
    errors = list[BaseException]()

    def target() -> None:
        try:
            main(stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    try:
        until(lambda: reached() or not thread.is_alive(), timeout_s, every_s=LOOK_S)
    finally:
        stop.set()
        stopped_s = time.monotonic()
        thread.join(patience(PATIENCE_S))
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    assert reached(), "it has ended before"
    return time.monotonic() - stopped_s
