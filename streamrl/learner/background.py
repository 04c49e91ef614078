"""Work that goes on beside the learner's own thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWorker:
    """One other thread, which does what it is handed, in order. Once something has failed, nothing
    more is done; whoever asks has that raised.
    """

    def __init__(self) -> None:
        self._thread, self._last, self._failure = (
            ThreadPoolExecutor(1, "background"),
            Future[None](),
            list[BaseException](),
        )
        self._last.set_result(None)

    def submit(self, work: Callable[[], object]) -> None:
        self._last = self._thread.submit(self._run, work)

    def raise_if_failed(self) -> None:
        """Raises what has failed so far."""
        if self._failure:
            raise self._failure[0]

    def wait(self) -> None:
        """Wait until all is done. Raises what has failed."""
        self._last.result()
        self.raise_if_failed()

    def close(self) -> None:
        """Wait until all is done, whatever comes of it."""
        self._thread.shutdown()

    def _run(self, work: Callable[[], object]) -> None:
        if not self._failure:
            try:
                work()
            except BaseException as error:
                self._failure.append(error)
