"""How much work an env may have in flight: what it has launched and not seen closed stays within
what the batcher wants. The count is exact, across restarts too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamrl.stream.records import Demand

RECENT_GROUPS = 256  # The expected size of a group is the mean of about so many.


@dataclass
class OutstandingLimit:
    """The account of one replica. Every group that it launches is closed exactly once in the
    buffer, and `Demand.closed_groups` counts that.
    """

    producer: str
    replicas: int
    guess_tokens: float  # the expected size of a group until the first is complete
    demand: Demand | None = None
    launched: int = 0  # groups since the run began, less those that were forgotten
    epoch: int = 0  # the newest one of the demand
    forgotten: int = 0  # groups that were launched and that no account waits for any more
    complete: int = 0  # groups that have been measured
    tokens: float = 0.0  # the size of those together

    @property
    def closed(self) -> int:
        """Groups of this replica that the buffer has closed since the run began."""
        return self.demand.closed_groups.get(self.producer, 0) if self.demand else 0

    @property
    def outstanding(self) -> int:
        """Groups that are launched and not closed."""
        return self.launched - self.closed

    @property
    def group_tokens(self) -> float:
        """The expected size of a group, prompts included."""
        return self.tokens / self.complete if self.complete else self.guess_tokens

    @property
    def capacity(self) -> int:
        """The number of groups that may be outstanding.

        Either the batcher grants this replica a number of groups, or the replica takes its share
        of the wanted tokens, rounded up to whole groups.
        """
        if self.demand is None:
            return 0
        if self.demand.granted_groups:
            return self.demand.granted_groups.get(self.producer, 0) - self.closed
        return math.ceil(self.demand.wanted_tokens / self.replicas / self.group_tokens)

    def allows(self) -> bool:
        """Whether another group may be launched."""
        return self.outstanding < self.capacity

    def on_demand(self, demand: Demand, unpublished: int = 0) -> None:
        """Take note of the newest demand. At a new epoch the published groups that are not closed
        are forgotten, because some of them will never be: retention has deleted them.

        `unpublished`: groups that are launched and not published. They are counted in the new
        epoch.
        """
        self.demand = demand
        if demand.epoch > self.epoch:
            self.epoch = demand.epoch
            known = self.closed + unpublished
            self.forgotten += self.launched - known
            self.launched = known

    def record_group(self, tokens: float) -> None:
        """Count a complete group of this size, prompts included. Groups that failed are not
        counted, since they tell nothing about the size of the others.

        The mean is over about the last RECENT_GROUPS, because answers grow while a policy learns.
        """
        if self.complete >= RECENT_GROUPS:
            self.tokens = self.tokens * (RECENT_GROUPS - 1) / self.complete
            self.complete = RECENT_GROUPS - 1
        self.complete += 1
        self.tokens += tokens
