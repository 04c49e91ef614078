"""Which server is asked. Servers register themselves on `servers`; each client folds that topic and
decides for itself, so nobody stands in between.

The rule is `choose`: least work in flight wins, within a pool, and a conversation stays with its
last server while that is hardly busier. The last server has the conversation so far in its prefix
cache, which is worth waiting behind a few sequences, not behind any number of them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from streamrl.records import Server

logger = logging.getLogger(__name__)

# a server that has not been heard of for so long is not asked; never less than SILENT_BEATS
# heartbeats
SILENT_S = 10.0
SILENT_BEATS = 3
# what one report changes of what is thought others have there: who believes each at once runs with
# all others after the same server
NEWS = 0.2


class Heard(NamedTuple):
    """A server as it was last heard of, and when that was by the clock of this process: clocks of
    other machines decide nothing.
    """

    server: Server
    time_s: float


def live(
    heard: Collection[Heard],
    pool: str,
    time_s: float,
    avoid: Collection[str] = (),
    silent_s: float = SILENT_S,
) -> list[Server]:
    """The ready servers of `pool` that were heard of within `silent_s` of `time_s`, without those
    to `avoid`.

    Where there is none, those whose probe failed: a tolerance that all servers miss by a little
    must not stop the run, and corrections (docs/losses.md) weigh what they sample.
    """
    there = [
        s
        for s, at in heard
        if s.pool == pool and time_s - at <= silent_s and s.server_id not in avoid
    ]
    return [s for s in there if s.state == "ready"] or [
        s for s in there if s.state == "error" and s.doubted
    ]


def choose(
    among: Collection[Server],
    load: Mapping[str, float],
    asked: Mapping[str, int],
    last: str = "",
    margin: float = 0,
    grain: float = 0.5,
) -> Server | None:
    """`last` while its load exceeds the least by no more than `margin`; else the least loaded, of
    equals the one asked longest ago. None of none.

    `load`: sequences in flight, by server; less than `grain` apart they are equal. `asked`: when
    each was asked last, by any rising number.
    """
    least = min((load[s.server_id] for s in among), default=0.0)
    for server in among:
        if server.server_id == last and load[last] - least <= margin:
            return server
    equals = [s for s in among if load[s.server_id] - least < grain]
    return min(equals, key=lambda s: (asked.get(s.server_id, 0), s.server_id), default=None)


class Registry:
    """The servers as last heard of, and what this client has in flight on them."""

    def __init__(self, pool: str, stick_margin: float = 0, heartbeat_s: float = 1.0) -> None:
        self.pool, self.stick_margin = pool, stick_margin
        self.silent_s = max(SILENT_S, SILENT_BEATS * heartbeat_s)
        self.servers: dict[str, Server] = {}
        self._heard_s: dict[str, float] = {}  # when each was last heard of, here
        self._own: Counter[str] = Counter()  # sequences in flight, by server
        # sequences of other clients, by server: a mean over its reports, the last ones counting
        # most
        self._others: dict[str, float] = {}
        self._asked: dict[str, int] = {}  # number of the last request to each
        self._requests = 0
        self._doubted = False  # only servers whose probe failed are left
        self._suspects: set[str] = set()  # asked in vain since their last sign of life

    def heard(
        self, server_id: str, server: Server | None, time_s: float, old: bool = False
    ) -> None:
        """Take in a record of the `servers` topic, at `time_s`; None: it is gone.

        `old`: it was there before this process was, and says nothing of now. Its server is asked
        once it is heard of again.
        """
        self._suspects.discard(server_id)
        self._heard_s.pop(server_id, None)
        if server is None:
            self.servers.pop(server_id, None)
            self._others.pop(server_id, None)
            return
        others = max(server.in_flight - self._own[server_id], 0)
        before = self._others.get(server_id, others)
        self._others[server_id] = before + NEWS * (others - before)
        self.servers[server_id] = server
        if not old:
            self._heard_s[server_id] = time_s

    def age(self, server_id: str, time_s: float) -> float:
        """Seconds since it was heard of; infinite where it has not been since this process began."""
        return time_s - self._heard_s.get(server_id, -math.inf)

    def choose(
        self, time_s: float, sequences: int = 1, avoid: Collection[str] = (), last: str = ""
    ) -> Server | None:
        """Where to send so many, as the rule has it; to no suspect. Reports are a heartbeat old:
        what is less than half of what is sent is noise.
        """
        heard = [Heard(self.servers[name], at) for name, at in self._heard_s.items()]
        among = live(heard, self.pool, time_s, {*avoid, *self._suspects}, self.silent_s)
        self._note(among)
        load = {s.server_id: self.load(s.server_id) for s in among}
        return choose(among, load, self._asked, last, self.stick_margin, sequences / 2)

    def _note(self, among: Collection[Server]) -> None:
        """Say loudly when the only servers left are those whose probe failed, and when that is
        over.
        """
        doubted = any(server.doubted for server in among)
        if doubted and not self._doubted:
            why = next(server.error for server in among if server.doubted)
            logger.error(
                "no server of pool %s has passed its probe; those that failed it are asked all the same: %s",
                self.pool,
                why,
            )
        elif self._doubted and among and not doubted:
            logger.info("a server of pool %s has passed its probe again", self.pool)
        self._doubted = doubted if among else self._doubted

    def load(self, server_id: str) -> float:
        """Sequences in flight there: from here, and by its reports from others."""
        return self._own[server_id] + self._others[server_id]

    def begin(self, server_id: str, sequences: int) -> None:
        """So many are sent to it now; `end` must follow."""
        self._requests += 1
        self._asked[server_id] = self._requests
        self._own[server_id] += sequences

    def end(self, server_id: str, sequences: int) -> None:
        self._own[server_id] -= sequences

    def suspect(self, server_id: str) -> None:
        """It did not answer: not to be asked before its next sign of life."""
        self._suspects.add(server_id)
