"""Choice of a server. Servers register themselves on `servers`. Each client follows that topic and
chooses for itself, so there is no central dispatcher.

The rule is `choose_server`: within a pool, the least loaded server wins, but a conversation stays
with its last server while that one is hardly busier. The last server has the conversation in its
prefix cache, which is worth waiting for a few sequences, but not for any number.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from streamrl.stream.records import Server

logger = logging.getLogger(__name__)

# A server without a record for this long is not asked. It is at least SILENT_BEATS heartbeats.
SILENT_S = 10.0
SILENT_BEATS = 3
STICK_MARGIN = 8  # sequences that a conversation's server may have more than the least busy one
# EMA weight of a new load report. At 1.0 all clients would stampede to the same least-loaded
# server.
LOAD_EMA = 0.2


class KnownServer(NamedTuple):
    """A server's last record."""

    server: Server
    # When this process read the record, by its own clock. Clocks of other machines decide nothing.
    time_s: float


def live_servers(
    heard: Collection[KnownServer],
    pool: str,
    time_s: float,
    avoid: Collection[str] = (),
    silent_s: float = SILENT_S,
) -> list[Server]:
    """The ready servers of `pool` whose last record is at most `silent_s` old, without those to
    `avoid`.

    If there is none, the servers whose probe failed are returned. If all servers miss the tolerance
    by a little, the run must not stop, and corrections (docs/losses.md) weigh what they sample.
    """
    live = [
        known.server
        for known in heard
        if known.server.pool == pool
        and time_s - known.time_s <= silent_s
        and known.server.server_id not in avoid
    ]
    ready = [server for server in live if server.state == "ready"]
    if ready:
        return ready
    return [server for server in live if server.state == "error" and server.doubted]


def choose_server(
    among: Collection[Server],
    load: Mapping[str, float],
    asked: Mapping[str, int],
    last: str = "",
    margin: float = 0,
    grain: float = 0.5,
) -> Server | None:
    """`last`, while its load exceeds the least load by at most `margin`; otherwise the least loaded
    server. Of servers with equal loads, the one that was asked longest ago is chosen. None if there
    is no server.

    `load`: by server, the sequences in flight on it; loads that differ by less than `grain` count
    as equal. `asked`: by server, when it was last asked, as any increasing number.
    """
    least = min((load[s.server_id] for s in among), default=0.0)
    for server in among:
        if server.server_id == last and load[last] - least <= margin:
            return server
    equals = [s for s in among if load[s.server_id] - least < grain]
    return min(equals, key=lambda s: (asked.get(s.server_id, 0), s.server_id), default=None)


class Registry:
    """The servers that one client knows, and the load on each."""

    def __init__(self, pool: str, heartbeat_s: float = 1.0) -> None:
        self.pool = pool
        self.stick_margin: float = STICK_MARGIN
        self.silent_s = max(SILENT_S, SILENT_BEATS * heartbeat_s)
        self.servers: dict[str, Server] = {}
        # The following are by server.
        self._heard_s: dict[str, float] = {}  # when this process read its last record
        self._own: Counter[str] = Counter()  # sequences of this client in flight on it
        self._others: dict[str, float] = {}  # sequences of other clients: an EMA over its reports
        self._asked: dict[str, int] = {}  # the number of the last request to it
        self._failed: set[str] = set()  # servers that have not answered since their last record
        self._requests = 0
        self._doubted = False  # whether only servers whose probe failed are left

    def on_server(
        self, server_id: str, server: Server | None, time_s: float, old: bool = False
    ) -> None:
        """Apply a record of the `servers` topic that was read at `time_s`. None: the server has
        left.

        `old`: the record was written before this process started, so the server may be gone. It is
        used after its next record. A record under the key of another server is skipped.
        """
        if server is not None and server.server_id != server_id:
            return
        self._failed.discard(server_id)
        self._heard_s.pop(server_id, None)
        if server is None:
            self.servers.pop(server_id, None)
            self._others.pop(server_id, None)
            return
        others = max(server.in_flight - self._own[server_id], 0)
        before = self._others.get(server_id, others)
        self._others[server_id] = before + LOAD_EMA * (others - before)
        self.servers[server_id] = server
        if not old:
            self._heard_s[server_id] = time_s

    def age(self, server_id: str, time_s: float) -> float:
        """Seconds since the server's last record. Infinite if there has been none since this
        process started.
        """
        return time_s - self._heard_s.get(server_id, -math.inf)

    def choose(
        self, time_s: float, sequences: int = 1, avoid: Collection[str] = (), last: str = ""
    ) -> Server | None:
        """Choose a server for `sequences` sequences, skipping servers that just failed. Loads are
        up to one heartbeat old, so differences below `sequences / 2` count as equal.
        """
        heard = [KnownServer(self.servers[name], at) for name, at in self._heard_s.items()]
        among = live_servers(heard, self.pool, time_s, {*avoid, *self._failed}, self.silent_s)
        self._log_doubt(among)
        load = {server.server_id: self.load(server.server_id) for server in among}
        return choose_server(among, load, self._asked, last, self.stick_margin, sequences / 2)

    def _log_doubt(self, among: Collection[Server]) -> None:
        """Log an error when only servers whose probe failed are left, and when that is over."""
        doubted = any(server.doubted for server in among)
        if doubted and not self._doubted:
            why = next(server.error for server in among if server.doubted)
            logger.error(
                "no server of pool %s has passed its probe; those that failed it are asked all the"
                " same: %s",
                self.pool,
                why,
            )
        elif self._doubted and among and not doubted:
            logger.info("a server of pool %s has passed its probe again", self.pool)
        if among:
            self._doubted = doubted

    def load(self, server_id: str) -> float:
        """Sequences in flight on the server: those of this client, and those of others by its
        reports.
        """
        return self._own[server_id] + self._others[server_id]

    def acquire(self, server_id: str, sequences: int) -> None:
        """Count `sequences` as in flight on the server. `release` must follow."""
        self._requests += 1
        self._asked[server_id] = self._requests
        self._own[server_id] += sequences

    def release(self, server_id: str, sequences: int) -> None:
        """Count `sequences` as no longer in flight on the server."""
        self._own[server_id] -= sequences

    def mark_failed(self, server_id: str) -> None:
        """Avoid the server until its next record, because it did not answer."""
        self._failed.add(server_id)
