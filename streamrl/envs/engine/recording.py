"""The model calls of rollouts under way as records of turns.<env>, so that a replica that dies is
followed by one that goes on with its conversations.

A call is written with the replica's next transaction. A conversation asks for its next answer only
once the last one is in the log, so at most one answer of each is sampled again.

The process that follows runs the env's code again. While it asks what was asked before, it is given
the recorded answers; from the first request that is not recorded the policy is asked. An env that
asks something else than before goes on from there: what was asked up to there is the same, and
failing the rollout would leave out of training just what an env does by chance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.config import topology
from streamrl.log.codec import to_message
from streamrl.log.protocol import Message, Output
from streamrl.records import ModelCall, Record, SessionEnd, SessionStart
from streamrl.sessions.call_tree import CallTree

RecordedCalls = dict[str, ModelCall]
"""The calls of a session that lie in the log, by the request that they answer."""


class TurnRecorder:
    """Collects the records of an env's sessions for the next transaction of its replica."""

    def __init__(self, env: str, recorded: Mapping[str, RecordedCalls] | None = None) -> None:
        self.env = env
        self.kept_s = 0.0  # time that sampling the answers took that were taken from the log
        self.lost_s = 0.0  # the same of those that were sampled again, or not asked for again
        self._recorded = dict(recorded or {})
        self._messages: list[Message] = []
        self._added = asyncio.Event()  # set once these messages are in the log
        self._taken = asyncio.Event()  # the same for those that are being committed

    def session(self, start: SessionStart) -> SessionRecording:
        """Begin to record a session, or go on with it."""
        self.add(start.session, start)
        earlier = self._recorded.pop(start.session, None)
        return SessionRecording(start.session, earlier, self)

    def add(self, session: str, record: Record) -> asyncio.Event:
        """Write a record with the next transaction. Returns what is set once it is committed.
        Raises whatever msgspec raises if it cannot be written.
        """
        self._messages.append(to_message(Output(topology.turns(self.env), session, record)))
        return self._added

    def end(self, session: str, failure: str, truncation: str) -> None:
        end = SessionEnd(
            session=session, failure=failure, truncation=truncation, time_s=time.time()
        )
        self.add(session, end)

    @property
    def is_waiting(self) -> bool:
        """Is there something to be committed?"""
        return bool(self._messages)

    def take(self) -> list[Message]:
        """What is to be committed now."""
        taken = self._messages
        self._messages = []
        self._taken = self._added
        self._added = asyncio.Event()
        return taken

    def on_commit(self) -> None:
        """What was taken is in the log."""
        self._taken.set()


@dataclass
class SessionRecording:
    """The recorded calls of one session."""

    name: str
    # Those of an earlier process that were not asked for again yet. None: it begins only now.
    earlier: RecordedCalls | None = None
    recorder: TurnRecorder | None = None  # None: nothing is recorded
    _last: asyncio.Event | None = field(default=None, init=False)  # of the last call's transaction

    def answer_to(self, request: str, tree: CallTree) -> ModelCall | None:
        """The recorded answer to a request, unless it goes on from what is not in `tree`."""
        if not self.earlier or self.recorder is None:
            return None
        call = self.earlier.get(request)
        if call is None or (call.continues and call.continues not in tree.calls):
            return None
        del self.earlier[request]
        self.recorder.kept_s += call.inference_metadata.latency_s
        return call

    def up_to_state(self) -> list[ModelCall]:
        """The recorded calls up to the last one that has a state of the env. Those before it are
        not asked for again.
        """
        if not self.earlier or self.recorder is None:
            return []
        calls = list(self.earlier.values())
        while calls and calls[-1].state is None:
            calls.pop()
        for call in calls[:-1]:
            del self.earlier[call.request]
            self.recorder.kept_s += call.inference_metadata.latency_s
        return calls

    async def committed(self) -> None:
        """Wait until what was added is in the log."""
        if self._last is not None:
            await self._last.wait()

    def add(self, call: ModelCall) -> None:
        """Record a new call."""
        if self.recorder is None:
            return
        is_resumed = self.earlier is not None and self._last is None
        if is_resumed:  # it was being sampled when the process before this one ended
            self.recorder.lost_s += call.inference_metadata.latency_s
        self._last = self.recorder.add(self.name, call)

    def close(self) -> None:
        """The conversation is over: what is recorded and was not asked for again is lost."""
        if self.recorder is not None:
            for call in (self.earlier or {}).values():
                self.recorder.lost_s += call.inference_metadata.latency_s
        self.earlier = None
