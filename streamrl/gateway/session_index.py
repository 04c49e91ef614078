"""What is known of the sessions of a run: a fold of the records of turns.<env>.

Each replica of the gateway has one. They are equal once the replicas have read the same records, so
any replica can handle any call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from streamrl.errors import one_line
from streamrl.records import ModelCall, Record, SessionEnd, SessionStart
from streamrl.sessions.call_tree import CallTree, InvalidCall

logger = logging.getLogger(__name__)

MAX_ENDED = 100_000  # sessions of which it is remembered that they have ended


class LiveSession:
    """A session that has not ended, and its calls."""

    def __init__(self, env: str, start: SessionStart) -> None:
        self.env = env
        self.start = start
        self.tree = CallTree()
        self.changes = 0  # how often something has happened that the place of a request hangs on
        self.starts = 1
        self.started_s = float("-inf")  # when the agent was started again, if it was
        self.answered: dict[str, int] = {}  # request -> number of its answers
        # Digest of a request's body -> number of such requests that were begun since the agent was
        # last started, and have been answered.
        self.repeats: dict[str, int] = {}
        # The same for all requests that this replica has in hand, whether answered or not.
        self.asked: dict[str, int] = {}

    def add(self, call: ModelCall) -> None:
        """Add the next call of the log, unless its request has been answered already."""
        if not self.tree.add(call):
            return
        self.changes += 1
        self.answered[call.request] = self.answered.get(call.request, 0) + 1
        body, _, ordinal = call.request.rpartition("#")
        began_s = call.time_s - call.inference_metadata.latency_s
        # One that was in flight when the agent was killed is still to be asked for again.
        if ordinal.isdecimal() and began_s >= self.started_s:
            self.repeats[body] = max(self.repeats.get(body, 0), int(ordinal) + 1)

    def next_ordinal(self, body: str) -> int:
        """The number of a new request with a body of this digest."""
        return max(self.repeats.get(body, 0), self.asked.get(body, 0))

    def note_asked(self, body: str, ordinal: int) -> None:
        """This replica has this request in hand."""
        self.changes += 1
        self.asked[body] = max(self.asked.get(body, 0), ordinal + 1)

    def forget_asked(self, body: str, ordinal: int) -> None:
        """The request was not answered, so the next one like it is the same one."""
        if self.asked.get(body) == ordinal + 1:
            self.changes += 1
            self.asked[body] = ordinal

    def start_again(self, time_s: float) -> None:
        """The agent was killed and repeats its calls from the first one. It is given the recorded
        answers while its requests are the same.
        """
        self.changes += 1
        self.starts += 1
        self.started_s = time_s
        self.repeats.clear()
        self.asked.clear()


class SessionIndex:
    """The sessions of all envs, by (env, session)."""

    def __init__(
        self,
        on_end: Callable[[LiveSession], None] = lambda session: None,  # told of each that ends
        max_ended: int = MAX_ENDED,
    ) -> None:
        self.sessions: dict[tuple[str, str], LiveSession] = {}
        self._ended: dict[tuple[str, str], None] = {}  # the oldest first
        self._on_end = on_end
        self._max_ended = max_ended

    def apply(self, env: str, record: Record) -> None:
        """Add the next record of turns.<env>."""
        match record:
            case SessionStart():
                self._begin(env, record)
            case ModelCall():
                self._add(env, record)
            case SessionEnd():
                self._end((env, record.session))
            case _:
                pass

    def has_ended(self, env: str, session: str) -> bool:
        return (env, session) in self._ended

    def open_sessions(self, env: str) -> int:
        """The number of sessions of an env that have not ended."""
        return sum(1 for name, _ in self.sessions if name == env)

    def _begin(self, env: str, start: SessionStart) -> None:
        name = (env, start.session)
        if name in self._ended:
            return
        session = self.sessions.get(name)
        if session is None:
            self.sessions[name] = LiveSession(env, start)
            return
        session.start_again(start.time_s)

    def _add(self, env: str, call: ModelCall) -> None:
        session = self.sessions.get((env, call.session))
        if session is None:  # it has ended, or its beginning is no longer kept
            return
        try:
            session.add(call)
        except InvalidCall as error:
            logger.warning("session %r of %s: %s", call.session, env, one_line(error))

    def _end(self, name: tuple[str, str]) -> None:
        session = self.sessions.pop(name, None)
        if session is not None:
            self._on_end(session)
        self._ended.pop(name, None)
        self._ended[name] = None
        while len(self._ended) > self._max_ended:
            del self._ended[next(iter(self._ended))]
