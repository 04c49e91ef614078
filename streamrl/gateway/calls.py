"""Answers the model calls of agents: from the log, with a request in flight, or by sampling.

A request has a name in its session, and the first answers to it that lie in the log are the answers
to it. So a request that is repeated, on any replica, is sampled for once as far as anyone can tell.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import xxhash

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.gateway.follower import Follower
from streamrl.gateway.keys import SessionName
from streamrl.gateway.recorder import Recorder
from streamrl.gateway.requests import Answer, ChatRequest, RequestRefused, Told
from streamrl.gateway.sampling import Sampler
from streamrl.gateway.session_index import Session, SessionIndex
from streamrl.inference.client import ContextFull, RequestDenied, SamplingFailed
from streamrl.log.protocol import Output
from streamrl.sessions.call_tree import CallTree, answer_message
from streamrl.sessions.messages import Message


class Calls:
    """The model calls that this replica handles."""

    def __init__(
        self,
        run: RunFile,
        index: SessionIndex,
        follower: Follower,
        recorder: Recorder,
        sampler: Sampler,
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
        parse: Callable[[Told], ChatRequest],
        idempotency_key: str = "",
        is_retry: bool = False,
    ) -> Answer:
        """The answers to a request of a session. Raises RequestRefused.

        A request without a key that is no retry is a new one, even if its body is an earlier one's:
        an agent that asks the same twice gets two answers.
        """
        began_s = time.monotonic()
        async with limited(self._run.envs[name.env].timeout_s):
            await self._follower.catch_up()
        session = self.open_session(name)
        request = parse(lambda call: told(session.tree, call))
        body = request.digest()
        if idempotency_key:
            body = xxhash.xxh3_128_hexdigest(f"{body} {idempotency_key}".encode())
        ordinal = session.next_ordinal(body)
        if ordinal and (is_retry or idempotency_key):
            ordinal -= 1
        asked = f"{body}#{ordinal}"
        task = self._in_flight.get((name, asked))
        if task is not None or session.answered.get(asked, 0) >= request.n:
            self.counts["repeated"] += 1
        if session.answered.get(asked, 0) >= request.n:
            session.asked[body] = max(session.asked.get(body, 0), ordinal + 1)
            return answers_to(session.tree, asked)
        if task is None:
            self._refuse_too_many(session, request)
            session.asked[body] = max(session.asked.get(body, 0), ordinal + 1)
            task = asyncio.create_task(self._make(name, session, request, asked, began_s))
            self._in_flight[name, asked] = task
            task.add_done_callback(lambda _: self._in_flight.pop((name, asked), None))
        try:
            return await asyncio.shield(task)  # a retry may join it when this agent has left
        except RequestRefused:
            if session.asked.get(body) == ordinal + 1:
                session.asked[body] = ordinal
            raise

    def open_session(self, name: SessionName) -> Session:
        """The session, if calls of it are answered. Raises RequestRefused."""
        if self._index.has_ended(*name):
            raise RequestRefused(409, f"session {name.session} has ended; start another one")
        session = self._index.sessions.get(name)
        if session is None:
            raise RequestRefused(
                404, f"there is no session {name.session}; POST /rl/start_session begins one"
            )
        return session

    def _refuse_too_many(self, session: Session, request: ChatRequest) -> None:
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
        session: Session,
        request: ChatRequest,
        asked: str,
        began_s: float,
    ) -> Answer:
        """Sample, write, and return what the log then says of the request."""
        sampling_s = time.monotonic()
        try:
            calls = await self._sampler.sample(session, request, asked)
        except ContextFull as error:
            raise RequestRefused(400, str(error), code="context_length_exceeded") from None
        except RequestDenied as error:
            raise RequestRefused(400, str(error)) from None
        except SamplingFailed as error:
            raise RequestRefused(503, str(error), retry_after_s=1) from None
        sampled_s = time.monotonic()
        outputs = [Output(topology.turns(name.env), name.session, call) for call in calls]

        def is_applied() -> bool:
            is_open = self._index.sessions.get(name) is session
            return session.answered.get(asked, 0) >= request.n or not is_open

        async with limited(self._run.envs[name.env].timeout_s):
            await self._recorder.write(outputs, is_applied)
        if session.answered.get(asked, 0) < request.n:
            self.open_session(name)  # raises: it has ended meanwhile
        self.counts["calls"] += len(calls)
        self.counts["tokens"] += sum(len(call.tokens) for call in calls)
        self.counts["requests"] += 1
        self.added_s += time.monotonic() - began_s - (sampled_s - sampling_s)
        return answers_to(session.tree, asked)


@asynccontextmanager
async def limited(limit_s: float) -> AsyncIterator[None]:
    """Raises RequestRefused if the log does not answer within this time."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise RequestRefused(
            503, f"the log has not answered within {limit_s:g} s; ask again", retry_after_s=1
        ) from None


def answers_to(tree: CallTree, request: str) -> Answer:
    calls = tree.answers(request)
    return Answer(calls, [tree.context(call.call) for call in calls])


def told(tree: CallTree, call: str) -> list[Message] | None:
    """The conversation up to a call's answer as the agent was told it; None: there is no such
    call.
    """
    if call not in tree.calls:
        return None
    found = list[list[Message]]()
    while call:
        at = tree.calls[call]
        found.append([*at.messages, answer_message(at)])
        call = at.continues
    return [message for part in reversed(found) for message in part]
