"""How many sessions may be open: as many as the batcher wants tokens of their env.

More of them would only be sampled to grow too old. The sizes of the sessions that have ended show
how many tokens an open one will have.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.stream.records import Demand

MEMORY = 64.0  # sessions over which the mean size is taken, about


@dataclass
class SessionLimit:
    """The flow control of one env."""

    max_open: int  # sessions.max_open
    mean_tokens: float  # of a session; a guess until the first one has ended
    demand: Demand | None = None  # the newest; None: there is none yet
    ended: int = 0

    def on_session_end(self, tokens: int) -> None:
        """Learn the size of a session that has ended."""
        self.ended += 1
        weight = 1 / min(self.ended, MEMORY)
        self.mean_tokens += weight * (tokens - self.mean_tokens)

    def refusal(self, open_sessions: int, outstanding: int = 0) -> str:
        """Why no session may begin now, next to so many that are open; empty if one may.

        `outstanding`: sessions whose tokens are still to come, the open ones among them
        (`SessionIndex.count_outstanding`).
        """
        if open_sessions >= self.max_open:
            return f"{self.max_open} sessions are open (sessions.max_open); end one first"
        wanted = self.demand.wanted_tokens if self.demand is not None else None
        counted = max(open_sessions, outstanding)
        if wanted is not None and counted * self.mean_tokens >= wanted:
            return (
                f"{counted} sessions are open, or wait for rewards or for their group, and no more"
                " tokens are wanted than they will have; begin this one later"
            )
        return ""
