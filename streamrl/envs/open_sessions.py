"""The sessions that an env replica had open when its process ended: their records in turns.<env>,
and the offsets from which these have to be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress

from streamrl.config import topology
from streamrl.envs.api import Problem
from streamrl.envs.engine.recording import RecordedCalls, TurnRecorder
from streamrl.envs.engine.transcript import Task
from streamrl.envs.problem_cursor import ProblemCursor
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Offsets, partitions_of
from streamrl.stream.log.reading import read
from streamrl.stream.records import EnvProgress, ModelCall, SessionStart
from streamrl.system.errors import BrokerUnreachable

SCHEMAS = ("session-start", "model-call", "session-end")
MARK_S = 60.0  # between two looks at the end of turns.<env>


class ResumeOffsets:
    """The offsets in turns.<env> from which the next process of a replica has to read. All records
    of the replica's open problems are after them.
    """

    def __init__(self, offsets: Offsets, ends: Offsets, open_problems: Collection[int]) -> None:
        self.offsets = offsets
        self._next = ends
        self._open_before = set(open_problems)  # those that were open when the log ended at `_next`
        self._looked_s = time.monotonic()

    async def advance(self, log: Log, cursor: ProblemCursor) -> None:
        """Look up the end of the log every MARK_S."""
        if time.monotonic() - self._looked_s < MARK_S:
            return
        self._looked_s = time.monotonic()
        with suppress(BrokerUnreachable):
            ends = await asyncio.to_thread(log.end_offsets, list(self._next))
            self.on_ends(ends, cursor.progress.open_problems)

    def on_ends(self, ends: Offsets, open_problems: Collection[int]) -> None:
        """Advance to the last end that was noted, if all problems that were open then are closed:
        the records of all others are after it. Then note `ends`, the end of the log now.
        """
        if self._open_before.isdisjoint(open_problems):
            self.offsets = self._next
            self._next = ends
            self._open_before = set(open_problems)

    def by_partition(self) -> list[int]:
        return [offset for _, offset in sorted(self.offsets.items())]


def resume_recorder(
    log: Log, env: str, progress: EnvProgress, group_size: int
) -> tuple[TurnRecorder, ResumeOffsets]:
    """Continue recording where the process before this one ended."""
    partitions = partitions_of(log, [topology.turns(env)])
    since = dict(zip(partitions, progress.turns_from, strict=False))
    calls = recorded_calls(log, env, session_names(env, progress, group_size), since)
    ends = log.end_offsets(partitions)
    return TurnRecorder(env, calls), ResumeOffsets(since, ends, progress.open_problems)


def session_names(env: str, progress: EnvProgress, group_size: int) -> set[str]:
    """The names of the sessions of a replica's open problems."""
    names = set[str]()
    for number in progress.open_problems:
        task = Task(env, number, progress.producer, Problem([]))
        names.update(task.name(index).uid for index in range(group_size))
    return names


def recorded_calls(
    log: Log, env: str, sessions: Collection[str], since: Offsets
) -> dict[str, RecordedCalls]:
    """The model calls that the log has of these sessions. `since` has the offset from which each
    partition is read.
    """
    keys = {session.encode() for session in sessions}
    by_session = dict[str, RecordedCalls]()
    begins = log.beginning_offsets(partitions_of(log, [topology.turns(env)]))
    for (topic, partition), begin in begins.items():
        start = max(begin, since.get((topic, partition), 0))
        for message in read(log, topic, partition, start):
            if message.key not in keys:
                continue  # it need not be decoded
            match to_event(message, SCHEMAS).record:
                case SessionStart(session=session):
                    by_session.setdefault(session, {})
                case ModelCall(session=session, request=request) as call:
                    by_session.setdefault(session, {}).setdefault(request, call)
                case _:
                    pass
    return by_session
