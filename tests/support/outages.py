"""What a part reads of the log, and when, if it is away for a while or its clock is set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamrl.stream.log.protocol import Event

POLLED = 3  # records of a poll

Arrivals = list[tuple[int, Event]]  # the second in which each record is written, ascending


class Poll(NamedTuple):
    time_s: float
    events: list[Event]
    is_behind: bool  # Are records unread that were written while the part was away?


def polls(
    sent: Arrivals,
    end_s: int,
    away_at: int = 0,
    away_s: int = 0,
    jump_at: int = 0,
    jump_s: float = 0.0,
) -> Iterator[Poll]:
    """The polls of a part before second `end_s`, one a second at least. It is away from second
    `away_at` on for `away_s`, and its clock is set by `jump_s` at second `jump_at`.
    """
    unread = list[Event]()
    for second in range(end_s):
        unread += [event for at, event in sent if at == second]
        if away_at <= second < away_at + away_s:
            continue
        time_s = 1e6 + second + (jump_s if second >= jump_at else 0.0)
        while True:
            polled, unread = unread[:POLLED], unread[POLLED:]
            yield Poll(time_s, polled, bool(unread) and second == away_at + away_s)
            if not unread:
                break
