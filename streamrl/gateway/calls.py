"""Answers the model calls of agents: from the log, with a request in flight, or by sampling.

A request has a name in its session, and the first answers to it that lie in the log are the answers
to it. So a request that is repeated, on any replica, is sampled for once as far as anyone can tell.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import xxhash

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.gateway.follower import Follower
from streamrl.gateway.keys import SessionName
from streamrl.gateway.recorder import Recorder, limited
from streamrl.gateway.requests import Answer, ChatRequest, RequestRefused
from streamrl.gateway.sampling import CallSampler, continuation_of
from streamrl.gateway.session_index import LiveSession, SessionIndex
from streamrl.inference.client import ContextFull, RequestDenied, SamplingFailed
from streamrl.log.protocol import Output
from streamrl.records import ModelCall
from streamrl.sessions.call_tree import CallTree, Continuation


async def never() -> bool:
    return False


class Asked(NamedTuple):
    """A request as it stands in its session."""

    session: LiveSession
    request: ChatRequest
    body: str  # its digest
    ordinal: int  # among the requests with this body
    continuation: Continuation

    @property
    def name(self) -> str:
        """Names the request in its session."""
        return f"{self.body}#{self.ordinal}"


class Early(NamedTuple):
    """A request that is sampled for before it is known that nobody has answered it."""

    asked: Asked
    changes: int  # of its session, until then
    sampling: asyncio.Task[list[ModelCall]]


class Calls:
    """The model calls that this replica handles."""

    def __init__(
        self,
        run: RunFile,
        index: SessionIndex,
        follower: Follower,
        recorder: Recorder,
        sampler: CallSampler,
    ) -> None:
        self.counts = Counter[str]()
        self.added_s = 0.0  # time that requests took beside sampling
        self._run = run
        self._index = index
        self._follower = follower
        self._recorder = recorder
        self._sampler = sampler
        self._in_flight: dict[tuple[SessionName, str], asyncio.Task[Answer]] = {}

    async def answer(
        self,
        name: SessionName,
        parse: Callable[[CallTree], ChatRequest],
        idempotency_key: str = "",
        is_retry: bool = False,
        is_gone: Callable[[], Awaitable[bool]] = never,
    ) -> Answer:
        """The answers to a request of a session. Raises RequestRefused.

        A request without a key that is no retry is a new one, even if its body is an earlier one's:
        an agent that asks the same twice gets two answers. If it does so at once, on two replicas,
        one of them finds the other's answers in the log, and asks again. `is_gone`: the agent has
        left, and may have asked elsewhere.
        """
        began_s = time.monotonic()
        is_new = not (idempotency_key or is_retry)
        early = self._sample_early(name, parse) if is_new else None
        sampling: asyncio.Task[list[ModelCall]] | None = None
        try:
            async with limited(self._run.envs[name.env].timeout_s):
                await self._follower.catch_up()
            if early is not None and self._is_current(name, early):
                asked = early.asked
            else:
                asked = self._asked(name, parse, idempotency_key, is_new)
            session = asked.session
            if session.answered.get(asked.name, 0) >= asked.request.n:
                session.note_asked(asked.body, asked.ordinal)
                self.counts["repeated"] += 1
                return answers_to(session.tree, asked.name)
            task = self._in_flight.get((name, asked.name))
            if task is None:
                self._refuse_too_many(session, asked.request)
                if early is None or early.asked != asked:
                    sampling = self._sampling(asked)
                else:
                    sampling = early.sampling
                    early = None
                task = self._started(name, asked, sampling, began_s)
            else:
                self.counts["repeated"] += 1
        finally:
            if early is not None:
                early.sampling.cancel()
        try:
            answer = await asyncio.shield(task)  # a retry may join it when this agent has left
        except RequestRefused:
            session.forget_asked(asked.body, asked.ordinal)
            raise
        is_own = sampling is None or sampling.result()[0].call == answer.calls[0].call
        if is_own or not is_new or await is_gone():
            return answer
        return await self.answer(name, parse, is_gone=is_gone)

    def _sample_early(
        self, name: SessionName, parse: Callable[[CallTree], ChatRequest]
    ) -> Early | None:
        """Begin to sample while the log is asked for what other replicas have written. Most often
        there is nothing that matters here, because an agent stays with a replica.
        """
        if name not in self._index.sessions:
            return None
        try:
            asked = self._asked(name, parse, "", is_new=True)
        except RequestRefused:  # it may be answered once more is known
            return None
        if asked.session.answered.get(asked.name, 0) or (name, asked.name) in self._in_flight:
            return None
        return Early(asked, asked.session.changes, self._sampling(asked))

    def _is_current(self, name: SessionName, early: Early) -> bool:
        """Whether the request stands where it did, so that its messages need not be read again."""
        session = early.asked.session
        return self._index.sessions.get(name) is session and session.changes == early.changes

    def _asked(
        self,
        name: SessionName,
        parse: Callable[[CallTree], ChatRequest],
        idempotency_key: str,
        is_new: bool,
    ) -> Asked:
        """The request as it stands by what is known of its session. Raises RequestRefused."""
        session = self.open_session(name)
        request = parse(session.tree)
        body = request.digest()
        if idempotency_key:
            body = xxhash.xxh3_128_hexdigest(f"{body} {idempotency_key}".encode())
        ordinal = session.next_ordinal(body)
        if ordinal and not is_new:
            ordinal -= 1
        return Asked(
            session=session,
            request=request,
            body=body,
            ordinal=ordinal,
            continuation=continuation_of(session.tree, request),
        )

    def _sampling(self, asked: Asked) -> asyncio.Task[list[ModelCall]]:
        task = asyncio.create_task(
            self._sampler.sample(asked.session, asked.request, asked.continuation, asked.name)
        )
        # It may fail when nobody waits for it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _started(
        self,
        name: SessionName,
        asked: Asked,
        sampling: asyncio.Task[list[ModelCall]],
        began_s: float,
    ) -> asyncio.Task[Answer]:
        """The request in flight, which others may join."""
        asked.session.note_asked(asked.body, asked.ordinal)
        task = asyncio.create_task(self._make(name, asked, sampling, began_s))
        self._in_flight[name, asked.name] = task
        task.add_done_callback(lambda _: self._in_flight.pop((name, asked.name), None))
        return task

    def open_session(self, name: SessionName) -> LiveSession:
        """The session, if calls of it are answered. Raises RequestRefused."""
        if self._index.has_ended(*name):
            raise RequestRefused(409, f"session {name.session} has ended; start another one")
        session = self._index.sessions.get(name)
        if session is None:
            raise RequestRefused(
                404, f"there is no session {name.session}; POST /rl/start_session begins one"
            )
        return session

    def _refuse_too_many(self, session: LiveSession, request: ChatRequest) -> None:
        limit = self._run.gateway.max_calls
        if len(session.tree.calls) + request.n > limit:
            raise RequestRefused(
                400,
                f"a session has at most {limit} calls (gateway.max_calls), and this one has had"
                f" {len(session.tree.calls)}; end it",
                code="max_calls",
            )

    async def _make(
        self,
        name: SessionName,
        asked: Asked,
        sampling: asyncio.Task[list[ModelCall]],
        began_s: float,
    ) -> Answer:
        """Sample, write, and return what the log then says of the request."""
        try:
            calls = await sampling
        except ContextFull as error:
            raise RequestRefused(400, str(error), code="context_length_exceeded") from None
        except RequestDenied as error:
            raise RequestRefused(400, str(error)) from None
        except SamplingFailed as error:
            raise RequestRefused(503, str(error), retry_after_s=1) from None
        outputs = [Output(topology.turns(name.env), name.session, call) for call in calls]
        session = asked.session
        count = asked.request.n

        def is_applied() -> bool:
            is_open = self._index.sessions.get(name) is session
            return session.answered.get(asked.name, 0) >= count or not is_open

        async with limited(self._run.envs[name.env].timeout_s):
            await self._recorder.apply(outputs, is_applied)
        if session.answered.get(asked.name, 0) < count:
            self.open_session(name)  # raises: it has ended meanwhile
        self.counts["calls"] += len(calls)
        self.counts["tokens"] += sum(len(call.tokens) for call in calls)
        self.counts["requests"] += 1
        self.added_s += time.monotonic() - began_s - calls[0].inference_metadata.latency_s
        return answers_to(session.tree, asked.name)


def answers_to(tree: CallTree, request: str) -> Answer:
    calls = tree.answers(request)
    return Answer(calls, [tree.context(call.call) for call in calls])
