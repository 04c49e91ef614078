"""The sessions that env replicas had open when their process ended: their records in turns.<env>,
and the offsets from which these have to be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from streamrl.config import topology
from streamrl.envs.api import Problem
from streamrl.envs.engine.recording import RecordedCalls, TurnRecorder
from streamrl.envs.engine.transcript import Task
from streamrl.envs.problem_cursor import ProblemCursor
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Offsets, TopicPartition, partitions_of
from streamrl.stream.log.reading import read_partitions
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

    def is_due(self) -> bool:
        """Whether the end of the log is to be looked up again."""
        return time.monotonic() - self._looked_s >= MARK_S

    def on_ends(self, ends: Offsets, open_problems: Collection[int]) -> None:
        """Advance to the last end that was noted, if all problems that were open then are closed:
        the records of all others are after it. Then note `ends`, the end of the log now.
        """
        self._looked_s = time.monotonic()
        if self._open_before.isdisjoint(open_problems):
            self.offsets = self._next
            self._next = ends
            self._open_before = set(open_problems)

    def by_partition(self) -> list[int]:
        return [offset for _, offset in sorted(self.offsets.items())]

    @property
    def partitions(self) -> list[TopicPartition]:
        return list(self._next)


async def advance_offsets(
    log: Log, replicas: Sequence[tuple[ResumeOffsets, ProblemCursor]]
) -> None:
    """Look up the ends of the log for those of the replicas that are due, in one question."""
    due = [(offsets, cursor) for offsets, cursor in replicas if offsets.is_due()]
    partitions = {tp for offsets, _ in due for tp in offsets.partitions}
    if not partitions:
        return
    with suppress(BrokerUnreachable):
        ends = await asyncio.to_thread(log.end_offsets, partitions)
        for offsets, cursor in due:
            own = {tp: ends[tp] for tp in offsets.partitions}
            offsets.on_ends(own, cursor.progress.open_problems)


class Resumed(NamedTuple):
    """A replica whose recording is to be continued."""

    env: str
    progress: EnvProgress
    group_size: int


def resume_recorders(
    log: Log, replicas: Sequence[Resumed]
) -> list[tuple[TurnRecorder, ResumeOffsets]]:
    """Continue recording where the process before this one ended, for each of these replicas. The
    log is read once for all of them.
    """
    partitions = partitions_of(log, dict.fromkeys(topology.turns(each.env) for each in replicas))
    of_env: dict[str, list[TopicPartition]] = {}
    for tp in partitions:
        of_env.setdefault(topology.subject_of(tp[0]), []).append(tp)
    sessions = set[str]()
    starts: dict[TopicPartition, int] = {}
    for env, progress, group_size in replicas:
        sessions |= session_names(env, progress, group_size)
        since = dict(zip(of_env[env], progress.turns_from, strict=False))
        for tp in of_env[env]:
            start = since.get(tp, 0)
            starts[tp] = min(start, starts.get(tp, start))
    calls = recorded_calls(log, sessions, starts)
    ends = log.end_offsets(partitions)
    resumed: list[tuple[TurnRecorder, ResumeOffsets]] = []
    for env, progress, group_size in replicas:
        own = session_names(env, progress, group_size) & calls.keys()
        recorder = TurnRecorder(env, {name: calls[name] for name in own})
        since = dict(zip(of_env[env], progress.turns_from, strict=False))
        own_ends = {tp: ends[tp] for tp in of_env[env]}
        resumed.append((recorder, ResumeOffsets(since, own_ends, progress.open_problems)))
    return resumed


def session_names(env: str, progress: EnvProgress, group_size: int) -> set[str]:
    """The names of the sessions of a replica's open problems."""
    names = set[str]()
    for number in progress.open_problems:
        task = Task(env, number, progress.producer, Problem([]))
        names.update(task.name(index).uid for index in range(group_size))
    return names


def recorded_calls(
    log: Log, sessions: Collection[str], starts: Offsets
) -> dict[str, RecordedCalls]:
    """The model calls that the log has of these sessions. `starts` has the offset from which each
    partition is read.
    """
    keys = {session.encode() for session in sessions}
    by_session = dict[str, RecordedCalls]()
    begins = log.beginning_offsets(list(starts))
    ends = log.end_offsets(list(starts))
    existing = {tp: max(start, begins[tp]) for tp, start in starts.items()}
    for message in read_partitions(log, existing, ends):
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
