"""When a server loads a policy version: a new one at once, and one whose load failed again, after a
time that doubles with each failure.
"""

from __future__ import annotations

import math

from streamrl.stream.records import PolicyVersion

RETRY_S = 5.0  # The time from the first failed load to the next.
MAX_RETRY_S = 60.0


class LoadSchedule:
    """Decides when the newest version is loaded. All times are of one monotonic clock, in s."""

    def __init__(self) -> None:
        self._attempted: PolicyVersion | None = None
        self._failures = 0  # since a load last succeeded
        self._retry_s = math.inf  # when the attempted version is loaded again

    def is_due(self, newest: PolicyVersion, time_s: float) -> bool:
        """Whether `newest` is to be loaded now. It is assumed that nothing is being loaded."""
        return newest is not self._attempted or time_s >= self._retry_s

    def on_attempt(self, version: PolicyVersion) -> None:
        """The load of `version` has begun."""
        self._attempted = version

    def on_success(self) -> None:
        self._failures = 0
        self._retry_s = math.inf

    def on_failure(self, time_s: float) -> None:
        """The copy of the attempted version was bad, or its probe failed."""
        self._failures += 1
        self._retry_s = time_s + min(RETRY_S * 2 ** (self._failures - 1), MAX_RETRY_S)
