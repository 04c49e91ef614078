"""A part in a thread of its own, over a log in memory: started, watched, stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.support.waiting import patience

PATIENCE_S = 60.0
LOOK_S = 0.01


def live(
    main: Callable[[threading.Event], object],
    until: Callable[[], bool],
    timeout_s: float = PATIENCE_S,
) -> float:
    """One life of `main`, stopped as soon as `until` holds. Returns the seconds that stopping took;
    raises what it raised.
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
    deadline = time.monotonic() + patience(timeout_s)
    while thread.is_alive() and not until() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    stop.set()
    before = time.monotonic()
    thread.join(patience(PATIENCE_S))
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    assert until(), "it did not get there"
    return time.monotonic() - before
