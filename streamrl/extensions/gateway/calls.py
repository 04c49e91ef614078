"""Answers the model calls of agents: from the log, with a request in flight, or by sampling.

A request has a name in its session: the digest of its body, and how many requests with that body
came before it. The first answers to a request in the log are its answers, whichever
replica sampled them. So a request that is repeated, on any replica, is sampled for once as far as
anyone can tell. `ModelCallHandler.answer` keeps this rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash
from msgspec import structs

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.call_tree import CallTree, Continuation
from streamrl.envs.sessions.keys import SessionName
from streamrl.extensions.gateway.follower import Follower
from streamrl.extensions.gateway.recorder import Recorder
from streamrl.extensions.gateway.requests import (
    Answer,
    ChatRequest,
    ParsedRequest,
    RequestRejected,
    UnknownCall,
    parsed_request,
)
from streamrl.extensions.gateway.sampling import CallSampler, continuation_of
from streamrl.extensions.gateway.session_index import (
    BYTES_PER_TOKEN,
    FREE_BYTES,
    LiveSession,
    SessionIndex,
    message_bytes,
)
from streamrl.inference.clients.client import ContextFull, SamplingFailed, SamplingRejected
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import ModelCall
from streamrl.system.offloading import Offloader

Sampling = asyncio.Task[list[ModelCall]]

MAX_CALLS = 1_024  # of a session
# Answers of a session that are sampled or recorded at a time. One agent must not use up a server.
MAX_IN_FLIGHT = 256
FREE_MESSAGES = 1_024  # of a conversation, and one more for each token of a context
LEFT_POLL_S = 0.25  # How often a call in flight looks whether its agent is still there.
LEFT_GRACE_S = 10.0  # A call whose agent has left waits so long for a retry, and is cancelled.


async def never() -> bool:
    return False


class AgentRequest(NamedTuple):
    """A request as it comes from an agent."""

    session: SessionName
    parse: Callable[[CallTree], ChatRequest]  # reads the body, with the calls of its session
    size: int = 0  # of the body, in bytes
    idempotency_key: str = ""
    is_retry: bool = False
    is_gone: Callable[[], Awaitable[bool]] = never  # Has the agent left? It may ask elsewhere.
    is_trained: bool = True  # Does the agent want the answer to be trained on?

    @property
    def is_new(self) -> bool:
        """Whether this is a new request, even if its body is an earlier one's. An agent that
        asks the same twice gets two answers.
        """
        return not (self.idempotency_key or self.is_retry)


class PendingRequest(NamedTuple):
    """A request with its name and its position in the session."""

    session: LiveSession
    chat: ChatRequest
    body: str  # its digest
    ordinal: int  # how many requests with this body came before it
    continuation: Continuation
    is_trained: bool

    @property
    def name(self) -> str:
        """Names the request in its session."""
        return f"{self.body}#{self.ordinal}"

    @property
    def key(self) -> tuple[SessionName, str]:
        """Names the request in the run."""
        return self.session.name, self.name

    @property
    def is_answered(self) -> bool:
        """Whether all its answers are in the log."""
        return self.session.answer_counts.get(self.name, 0) >= self.chat.n

    def recorded_answer(self) -> Answer:
        """The answers that are in the log."""
        tree = self.session.tree
        calls = tree.answers(self.name)
        return Answer(calls, [tree.context(call.call) for call in calls])


class Speculation:
    """Samples for a request while the log is read, on the guess that the log has nothing that
    matters for it. At the end of the `with` block sampling is cancelled, unless it was claimed.
    """

    def __init__(
        self,
        request: PendingRequest | None = None,
        sampling: Sampling | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        self._revision = request.session.revision if request is not None else 0
        self._sampling = sampling
        self._release = release  # of what was reserved for the request

    def __enter__(self) -> Speculation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            self._release()

    def current_request(self, index: SessionIndex) -> PendingRequest | None:
        """The request, if its session is as it was. Then its body need not be read again."""
        if self._request is None:
            return None
        session = self._request.session
        is_unchanged = index.is_open(session) and session.revision == self._revision
        return self._request if is_unchanged else None

    def claim(self, request: PendingRequest) -> Sampling | None:
        """Take over what is sampled for this request, and what is reserved for it. None: nothing
        is, or for another request.
        """
        if self._request != request:
            return None
        sampling = self._sampling
        self._sampling = None
        return sampling


@dataclass
class CallInFlight:
    """A request that this replica samples and records. Repetitions of the request join it."""

    sampling: Sampling
    recording: asyncio.Task[Answer]  # the answers that the log has in the end
    waiting: list[AgentRequest] = field(default_factory=list[AgentRequest])

    async def is_lost(self) -> bool:
        """Whether all agents that waited for the answers have left."""
        return all([await agent.is_gone() for agent in self.waiting])

    def cancel_if_left(self) -> None:
        """Stop sampling, unless an agent waits for it. What is sampled already is recorded."""
        if not self.waiting:
            self.sampling.cancel()

    @property
    def is_first(self) -> bool:
        """Whether the answers in the log are those sampled here, and not another replica's."""
        return self.sampling.result()[0].call == self.recording.result().calls[0].call


class ModelCallHandler:
    """The model calls that this replica handles."""

    def __init__(
        self,
        run: RunFile,
        index: SessionIndex,
        follower: Follower,
        recorder: Recorder,
        sampler: CallSampler,
        offloader: Offloader,
    ) -> None:
        self.counts = Counter[str]()
        self.added_s = 0.0  # time that requests took without sampling
        self._run = run
        self._index = index
        self._follower = follower
        self._recorder = recorder
        self._sampler = sampler
        self._offloader = offloader
        self._in_flight: dict[tuple[SessionName, str], CallInFlight] = {}
        self._reserved = Counter[SessionName]()  # answers that are not in the log yet
        self._writing = Counter[SessionName]()  # bytes of messages that are not in the log yet

    async def answer(self, incoming: AgentRequest) -> Answer:
        """The answers to a request of a session. Raises RequestRejected.

        Once the log is read up to its end, a request that the log answers gets that answer, and a
        request that is in flight here is joined. For any other this replica samples, writes what it
        has sampled, and returns the first answers that the log then has. It speculates that it will
        have to sample, and begins before the log is read.
        """
        began_s = time.monotonic()
        parsed = await self._parse(incoming)
        while True:
            with self._speculate(incoming, parsed) as speculation:
                await self._catch_up(incoming.session)
                request = speculation.current_request(self._index)
                if request is None:
                    request = self._locate_request(incoming, parsed)
                if request.is_answered:
                    return await self._repeat_answer(incoming, request)
                joined = self._join(request)
                call = joined or self._start(request, speculation, began_s)
            await self._await_answer(incoming, call)
            if joined or call.is_first or not incoming.is_new or await incoming.is_gone():
                return await self._hand_over(incoming, request, call)
            # The agent has asked the same at once on another replica, which was answered first. So
            # this is the next request with the same body: it gets another name, and other answers.
            began_s = time.monotonic()

    async def recorded_answer(self, name: SessionName, call: str) -> tuple[Answer, LiveSession]:
        """An answer that an open session has had, and the session. Raises RequestRejected."""
        await self._catch_up(name)
        session = self._open_session(name)
        tree = session.tree
        if call not in tree.calls:
            raise RequestRejected(404, f"session {name.session} has no response {call}")
        return Answer([tree.calls[call]], [tree.context(call)]), session

    async def count_prompt_tokens(self, incoming: AgentRequest) -> int:
        """The tokens of the prompt of a request, which is not answered. Raises RequestRejected."""
        parsed = await self._parse(incoming)
        await self._catch_up(incoming.session)
        request = self._locate_request(incoming, parsed)
        # A count costs a server as much as the prompt of an answer, so it has room among them.
        release = self._reserve(request.session, 1)
        try:
            return await self._sampler.count_prompt_tokens(
                request.session, request.chat, request.continuation
            )
        except SamplingFailed as error:
            raise _rejection_of(error) from None
        finally:
            release()

    async def _catch_up(self, session: SessionName) -> None:
        """Read the log up to its end. Raises RequestRejected where that takes too long."""
        await self._follower.catch_up(self._run.envs[session.env].timeout_s)

    # ---- which request it is -----------------------------------------------------------------

    async def _parse(self, incoming: AgentRequest) -> ParsedRequest:
        """The request, read once. What it refers to may be in the part of the log that has not been
        read. Raises RequestRejected.
        """
        session = self._index.sessions.get(incoming.session)
        if session is not None:
            with contextlib.suppress(UnknownCall):
                return await self._parse_in(session, incoming)
        await self._catch_up(incoming.session)
        return await self._parse_in(self._open_session(incoming.session), incoming)

    async def _parse_in(self, session: LiveSession, incoming: AgentRequest) -> ParsedRequest:
        """The request, read with what is known of its session. Only single calls are looked up
        there, so more of them may come meanwhile.
        """
        # A short request may refer to a long conversation.
        size = incoming.size + session.message_bytes
        return await self._offloader.run(
            str(session.name), size, lambda: parsed_request(incoming.parse(session.tree))
        )

    def _speculate(self, incoming: AgentRequest, parsed: ParsedRequest) -> Speculation:
        """Begin to sample while the log is asked what other replicas have written. Most often they
        have written nothing that matters here, because an agent stays with a replica.
        """
        if not incoming.is_new:
            return Speculation()
        try:
            request = self._locate_request(incoming, parsed)
        except RequestRejected:  # it may be answered once more is known
            return Speculation()
        if request.name in request.session.answer_counts or request.key in self._in_flight:
            return Speculation()
        try:
            release = self._reserve(request.session, request.chat.n)
        except RequestRejected:  # other answers may fail, which would leave room for these
            return Speculation()
        return Speculation(request, self._start_sampling(request), release)

    def _locate_request(self, incoming: AgentRequest, parsed: ParsedRequest) -> PendingRequest:
        """Name the request, and find what it continues, by what is known of its session. Raises
        RequestRejected.
        """
        session = self._open_session(incoming.session)
        chat = parsed.chat
        self._check_length(session.env, chat)
        body = parsed.digest
        if incoming.idempotency_key:
            body = xxhash.xxh3_128_hexdigest(f"{body} {incoming.idempotency_key}".encode())
        ordinal = session.next_ordinal(body)
        if ordinal and not incoming.is_new:
            ordinal -= 1
        return PendingRequest(
            session=session,
            chat=chat,
            body=body,
            ordinal=ordinal,
            continuation=continuation_of(session.tree, parsed),
            is_trained=incoming.is_trained and not self._is_left_out(session.env, chat),
        )

    def _is_left_out(self, env: str, chat: ChatRequest) -> bool:
        """Whether the run file leaves the answers to this request out of training."""
        sessions = self._run.envs[env].sessions
        marks = sessions.untrained if sessions is not None else []
        seen = [message for message in chat.messages[:-1] if message["role"] == "system"]
        texts = [message["content"] for message in (*seen, *chat.messages[-1:])]
        return any(mark in text for mark in marks for text in texts)

    def _check_length(self, env: str, chat: ChatRequest) -> None:
        """Raises RequestRejected for a conversation that is longer than any context, before a
        server makes tokens of it: a token has only so many characters.
        """
        pool = self._run.envs[env].pool
        context = self._run.inference.of_pool(pool).max_model_len
        characters = sum(len(message["content"]) for message in chat.messages)
        if characters > FREE_BYTES + BYTES_PER_TOKEN * context:
            raise no_room(f"{characters:,} characters", context)

    def check_message_count(self, env: str, count: int) -> None:
        """Raises RequestRejected for more messages than a context has room for. That is known
        before any of them is read.
        """
        context = self._run.inference.of_pool(self._run.envs[env].pool).max_model_len
        if count > FREE_MESSAGES + context:
            raise no_room(f"{count:,} messages", context)

    def _open_session(self, name: SessionName) -> LiveSession:
        """The session, if calls of it are answered. Raises RequestRejected."""
        if self._index.has_ended(name):
            raise RequestRejected(409, f"session {name.session} has ended; start another one")
        session = self._index.sessions.get(name)
        if session is None:
            raise RequestRejected(
                404, f"there is no session {name.session}; POST /rl/start_session begins one"
            )
        return session

    # ---- how it is answered ------------------------------------------------------------------

    async def _repeat_answer(self, incoming: AgentRequest, request: PendingRequest) -> Answer:
        """The answers that the log has had before."""
        request.session.reserve_ordinal(request.body, request.ordinal)
        self.counts["repeated"] += 1
        if not await incoming.is_gone():
            await self._record_lost(request, lost=False)
        return request.recorded_answer()

    async def _hand_over(
        self, incoming: AgentRequest, request: PendingRequest, call: CallInFlight
    ) -> Answer:
        """The answers to a request that was in flight. If no agent takes them, they are lost."""
        if not await incoming.is_gone():
            await self._record_lost(request, lost=False)
        elif call.is_first and await call.is_lost():
            await self._record_lost(request, lost=True)
        return request.recorded_answer()

    async def _record_lost(self, request: PendingRequest, lost: bool) -> None:
        """Record the answers once more, where the log has not whether they are lost."""
        session = request.session
        wrong = [call for call in request.recorded_answer().calls if call.lost != lost]
        if not (wrong and self._index.is_open(session)):
            return
        self.counts["lost"] += len(wrong) if lost else 0
        topic = topology.turns(session.env)
        outputs = [
            Output(topic, session.name.session, structs.replace(call, lost=lost)) for call in wrong
        ]
        await self._recorder.write_and_wait(
            outputs,
            lambda: (
                not self._index.is_open(session)
                or all(session.tree.calls[call.call].lost == lost for call in wrong)
            ),
            self._run.envs[session.env].timeout_s,
        )

    def _join(self, request: PendingRequest) -> CallInFlight | None:
        """The same request, if it is in flight."""
        call = self._in_flight.get(request.key)
        if call is not None:
            self.counts["repeated"] += 1
        return call

    def _start(
        self, request: PendingRequest, speculation: Speculation, began_s: float
    ) -> CallInFlight:
        """Sample and record answers to a request, which is in flight until then. Raises
        RequestRejected.
        """
        sampling = speculation.claim(request)
        if sampling is None:
            self._reserve(request.session, request.chat.n)
            sampling = self._start_sampling(request)
        request.session.reserve_ordinal(request.body, request.ordinal)
        recording = asyncio.create_task(self._sample_and_record(request, sampling, began_s))
        call = CallInFlight(sampling, recording)
        self._in_flight[request.key] = call

        def on_done(recording: asyncio.Task[Answer]) -> None:
            del self._in_flight[request.key]
            self._release(request.session.name, request.chat.n)
            if recording.cancelled() or recording.exception() is not None:
                request.session.release_ordinal(request.body, request.ordinal)

        recording.add_done_callback(on_done)
        return call

    def _reserve(self, session: LiveSession, n: int) -> Callable[[], None]:
        """Keep room for `n` answers among the calls of a session. Returns what gives it back.
        Raises RequestRejected.
        """
        reserved = self._reserved[session.name]
        recorded = len(session.tree.calls)
        if recorded + reserved + n > MAX_CALLS:
            raise RequestRejected(
                400,
                f"a session has at most {MAX_CALLS} calls. This one has had"
                f" {recorded} and waits for {reserved}; end it",
                code="max_calls",
            )
        if reserved and reserved + n > MAX_IN_FLIGHT:
            raise RequestRejected(
                429,
                f"{reserved} answers of this session are being sampled, and {MAX_IN_FLIGHT} may be"
                " at a time; wait for them",
                retry_after_s=1,
            )
        self._reserved[session.name] += n
        return lambda: self._release(session.name, n)

    def _release(self, session: SessionName, n: int) -> None:
        self._reserved[session] -= n
        if not self._reserved[session]:
            del self._reserved[session]

    def _start_sampling(self, request: PendingRequest) -> Sampling:
        sampling = asyncio.create_task(
            self._sampler.sample(request.session, request.chat, request.continuation, request.name)
        )
        # It may fail when no request waits for it.
        sampling.add_done_callback(lambda done: done.cancelled() or done.exception())
        return sampling

    async def _await_answer(self, incoming: AgentRequest, call: CallInFlight) -> Answer:
        """Wait for the answers as long as the agent does. A retry may join the call when this agent
        has left, so it is cancelled only some time later. Raises RequestRejected.
        """
        call.waiting.append(incoming)
        try:
            while not call.recording.done():
                await asyncio.wait([call.recording], timeout=LEFT_POLL_S)
                if not call.recording.done() and await incoming.is_gone():
                    raise RequestRejected(499, "the agent has left before its answer was sampled")
            if call.recording.cancelled():  # a moment before this retry joined the call
                raise RequestRejected(
                    503, "the agents that asked had left; ask again", retry_after_s=1
                )
            return call.recording.result()
        finally:
            if not call.recording.done():
                call.waiting.remove(incoming)
            if not (call.waiting or call.sampling.done()):
                asyncio.get_running_loop().call_later(LEFT_GRACE_S, call.cancel_if_left)

    async def _sample_and_record(
        self, request: PendingRequest, sampling: Sampling, began_s: float
    ) -> Answer:
        """Wait for the sampled answers, write them, and return the answers that the log then has.
        Raises RequestRejected.
        """
        try:
            calls = await sampling
        except SamplingFailed as error:
            raise _rejection_of(error) from None
        session = request.session
        env, session_id = session.name
        size = sum(map(message_bytes, calls))
        tokens = sum(len(call.prompt) + len(call.tokens) for call in calls)
        session.check_message_bytes(size + self._writing[session.name], tokens)
        lost = await self._in_flight[request.key].is_lost()
        self.counts["lost"] += len(calls) if lost else 0
        outputs = [
            Output(
                topology.turns(env),
                session_id,
                structs.replace(call, trained=request.is_trained, lost=lost),
            )
            for call in calls
        ]
        self._writing[session.name] += size
        try:
            await self._recorder.write_and_wait(
                outputs,
                lambda: request.is_answered or not self._index.is_open(session),
                self._run.envs[env].timeout_s,
            )
        finally:
            self._writing[session.name] -= size
            if not self._writing[session.name]:
                del self._writing[session.name]
        if not request.is_answered:
            self._open_session(session.name)  # raises: it has ended meanwhile
        self.counts["calls"] += len(calls)
        self.counts["tokens"] += sum(len(call.tokens) for call in calls)
        self.counts["requests"] += 1
        self.added_s += time.monotonic() - began_s - calls[0].inference_metadata.latency_s
        return request.recorded_answer()


def _rejection_of(error: SamplingFailed) -> RequestRejected:
    """What the agent is answered where the servers do not sample."""
    if isinstance(error, ContextFull):
        return RequestRejected(400, str(error), code="context_length_exceeded")
    if isinstance(error, SamplingRejected):
        return RequestRejected(400, str(error))
    return RequestRejected(503, str(error), retry_after_s=1)


def no_room(what: str, context: int) -> RequestRejected:
    return RequestRejected(
        400,
        f"{what} have no room in a context of {context:,} tokens (inference.max_model_len)",
        code="context_length_exceeded",
    )
