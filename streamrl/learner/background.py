"""BackgroundWorker runs work on a thread next to the learner's training thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWorker:
    """One thread that runs submitted work in order. After the first failure it runs nothing more,
    and the failure is raised to the caller who asks.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "background")
        self._failure: BaseException | None = None
        self._last = Future[None]()
        self._last.set_result(None)

    def submit(self, work: Callable[[], object]) -> Future[None]:
        """Queue work and return at once. The future is done when the work is, or has failed."""
        self._last = self._thread.submit(self._run, work)
        return self._last

    def raise_if_failed(self) -> None:
        """Raise the first failure, if there was one. This does not wait."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait until all submitted work is done, then raise the first failure if there was one."""
        self._last.result()
        self.raise_if_failed()

    def close(self) -> None:
        """Wait until all submitted work is done and end the thread. Failures are not raised."""
        self._thread.shutdown()

    def _run(self, work: Callable[[], object]) -> None:
        if self._failure is None:
            try:
                work()
            except BaseException as error:
                self._failure = error
