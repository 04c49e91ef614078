"""AwakeClock: the clock by which a part measures how long something has waited.

The time of a step is the time of the machine, which runs on while the part is away and may be set.
A limit on waiting that went by it would end what has only not been read yet. So the state of a part
has a clock that counts the time in which the part was there: each step adds what has passed since
the step before, and never more than MAX_STEP_S. It does not advance until the part has read the
records that were in the log when it started, and no limit is reached before.

A part that uses it gives it to its `Processor` as `clock`, advances it first in every step, asks
`is_due` in its `due` while anything waits, notes `awake_s` where a wait begins, and asks
`has_waited`.
"""

from __future__ import annotations

import msgspec

TICK_S = 1.0  # A step is made so often while anything waits, although no record comes.
MAX_STEP_S = 2.0  # The most that a step adds.


class AwakeClock(msgspec.Struct):
    """How long a part has been awake. It is part of the part's state."""

    awake_s: float = 0.0
    # The time of the last step, in seconds since the epoch; below 0 if there was none.
    last_step_s: float = -1.0
    # Whether records that were in the log at the start are unread. The processor sets it before
    # each step, and its journal has it.
    is_behind: bool = False

    def advance(self, time_s: float) -> None:
        """Count the time since the last step. `time_s`: of this step."""
        if self.last_step_s >= 0 and not self.is_behind:
            self.awake_s += min(max(time_s - self.last_step_s, 0.0), MAX_STEP_S)
        self.last_step_s = time_s

    def has_waited(self, since_s: float, limit_s: float) -> bool:
        """Whether a wait that began when the clock was at `since_s` has reached its limit."""
        return not self.is_behind and self.awake_s - since_s >= limit_s

    def is_due(self, time_s: float) -> bool:
        """Whether a step is to be made so that the clock advances. It is if the machine's clock was
        set back.
        """
        return abs(time_s - self.last_step_s) >= TICK_S
