"""Records the model calls of rollouts under way in turns.<env>, so that a replica that follows one
that died continues its conversations.

A call is written with the replica's next transaction. A conversation asks for its next answer only
once the last one is in the log, so at most one answer of each is sampled again.

The process that follows runs the env's code again. A request that was asked before gets the
recorded answer; from the first request that is not recorded on, the policy is asked. So an env that
asks something else than before continues from there. Failing its rollout would leave out of
training just what an env does by chance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.config import topology
from streamrl.envs.sessions.call_tree import CallTree
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import ModelCall, Record, SessionEnd, SessionStart

RecordedCalls = dict[str, ModelCall]
"""The calls of a session that are in the log, by the request that they answer."""


class TurnRecorder:
    """Collects the records of an env's sessions for the next transaction of its replica."""

    def __init__(self, env: str, recorded: Mapping[str, RecordedCalls] | None = None) -> None:
        self.env = env
        # Time that it took to sample the recorded answers:
        self.kept_s = 0.0  # those that were taken from the log
        self.lost_s = 0.0  # those that were sampled again, or not asked for again
        self._recorded = dict(recorded or {})
        self._messages: list[Message] = []
        self._added = asyncio.Event()  # set once these messages are in the log
        self._drained = asyncio.Event()  # the same for those that are being committed

    def session(self, start: SessionStart) -> SessionRecording:
        """Begin to record a session, or continue it."""
        self.add(start.session, start)
        earlier = self._recorded.pop(start.session, None)
        return SessionRecording(start.session, earlier, self)

    def add(self, session: str, record: Record) -> asyncio.Event:
        """Write a record with the next transaction. Returns the event that is set once it is
        committed. Raises whatever msgspec raises if the record cannot be written.
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
        """Whether records wait to be committed."""
        return bool(self._messages)

    def drain(self) -> list[Message]:
        """The records for the transaction that is made now."""
        drained = self._messages
        self._messages = []
        self._drained = self._added
        self._added = asyncio.Event()
        return drained

    def on_commit(self) -> None:
        """The drained records are in the log."""
        self._drained.set()


@dataclass
class SessionRecording:
    """The recorded calls of one session."""

    name: str
    # Those of an earlier process that were not asked for again yet. None: the session begins now.
    earlier: RecordedCalls | None = None
    recorder: TurnRecorder | None = None  # None: nothing is recorded
    _last: asyncio.Event | None = field(default=None, init=False)  # of the last call's transaction

    def answer_to(self, request: str, tree: CallTree) -> ModelCall | None:
        """The recorded answer to a request, unless it continues a call that is not in `tree`."""
        if not self.earlier or self.recorder is None:
            return None
        call = self.earlier.get(request)
        if call is None or (call.continues and call.continues not in tree.calls):
            return None
        del self.earlier[request]
        self.recorder.kept_s += call.inference_metadata.latency_s
        return call

    def up_to_state(self) -> list[ModelCall]:
        """The recorded calls up to the last one that has a state of the env. Of these only the last
        will be asked for again.
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

    async def wait_for_commit(self) -> None:
        """Wait until all added calls are in the log."""
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
        """The conversation is over. The recorded calls that were not asked for again are lost."""
        if self.recorder is not None:
            for call in (self.earlier or {}).values():
                self.recorder.lost_s += call.inference_metadata.latency_s
        self.earlier = None
