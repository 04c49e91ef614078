"""One replica of the gateway: what it has read of the log, and the objects that serve requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, closing

from starlette.applications import Starlette

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.keys import keys_of
from streamrl.extensions.gateway.calls import ModelCallHandler
from streamrl.extensions.gateway.flow_control import SessionLimit
from streamrl.extensions.gateway.follower import Follower
from streamrl.extensions.gateway.open_sessions import read_open_records
from streamrl.extensions.gateway.recorder import Recorder
from streamrl.extensions.gateway.sampling import CallSampler
from streamrl.extensions.gateway.server import HttpApi
from streamrl.extensions.gateway.session_index import LiveSession, SessionIndex
from streamrl.extensions.gateway.sessions_api import SessionsApi
from streamrl.inference.clients.client import apply_server_event, make_client
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import (
    Event,
    Log,
    Message,
    NonTransactionalProducer,
    partitions_of,
)
from streamrl.stream.records import Demand, Record, SessionStart
from streamrl.system.offloading import Offloader

logger = logging.getLogger(__name__)

TURN_SCHEMAS = ("session-start", "model-call", "reward", "session-end")
SCHEMAS = (*TURN_SCHEMAS, "server", "demand")
WAIT_S = 0.1


class GatewayReplica:
    """Wires the parts of the gateway. `follow` belongs to one thread, all else to the loop that
    serves `app`.
    """

    def __init__(self, run: RunFile, log: Log, producer: NonTransactionalProducer) -> None:
        self._run = run
        self._log = log
        self._turns = partitions_of(log, [topology.turns(env) for env in run.session_envs])
        others = partitions_of(log, [topology.SERVERS, topology.DEMAND])
        self._others = log.beginning_offsets(others)
        # Where the topics end as this process begins.
        self._began = log.end_offsets([*self._turns, *others])
        self._limits = {env: make_limit(run, env) for env in run.session_envs}
        wanted = {env: rewards_of(run, env) for env in run.session_envs}
        group_sizes = {env: run.buffer_of(env).group_size for env in run.session_envs}
        self._index = SessionIndex(wanted, self._on_session_end, group_sizes=group_sizes)
        pools = {run.envs[env].pool for env in run.session_envs}
        offloader = Offloader()
        self._clients = {pool: make_client(run, pool, offloader) for pool in pools}
        self._follower = Follower(log, self._turns, self._apply)
        recorder = Recorder(producer, self._follower)
        sampler = CallSampler(run, self._clients, offloader)
        keys = keys_of(run)
        self._calls = ModelCallHandler(
            run=run,
            index=self._index,
            follower=self._follower,
            recorder=recorder,
            sampler=sampler,
            offloader=offloader,
        )
        api = SessionsApi(
            run=run,
            index=self._index,
            follower=self._follower,
            recorder=recorder,
            keys=keys,
            limits=self._limits,
            clients=self._clients,
        )
        self._reported_counts = Counter[str]()
        self._reported_added_s = 0.0
        self._loop = Future[asyncio.AbstractEventLoop]()
        self.app = HttpApi(
            run=run,
            keys=keys,
            calls=self._calls,
            sessions=api,
            clients=self._clients,
            offloader=offloader,
        ).app(self._lifespan)

    def follow(self, is_over: Callable[[], bool], mark_ready: Callable[[], None]) -> None:
        """Read the log until `is_over`. The replica is ready once it has read what was there when
        it began.
        """
        while not self._loop.done():
            if is_over():
                return
            wait([self._loop], WAIT_S)
        loop = self._loop.result()
        began = {tp: self._began[tp] for tp in self._turns}
        is_ready = False

        def is_done() -> bool:
            nonlocal is_ready
            if not is_ready and self._follower.is_at(began):
                is_ready = True
                mark_ready()
            return is_over()

        open_records = read_open_records(self._log, self._turns, TURN_SCHEMAS)
        try:
            loop.call_soon_threadsafe(self._apply_events, open_records.events)
        except RuntimeError:  # the loop has ended meanwhile
            return
        offsets = {**self._others, **open_records.offsets}
        with closing(self._log.reader(offsets)) as reader:
            self._follower.follow(reader, loop, is_done)

    def metrics(self, seconds: float) -> dict[str, float]:
        """What happened since the last time, `seconds` ago, and what is open now."""
        counts = self._calls.counts.copy()
        new = counts - self._reported_counts
        self._reported_counts = counts
        added_s = self._calls.added_s - self._reported_added_s
        self._reported_added_s += added_s
        return {
            "gateway/open_sessions": len(self._index.sessions),
            "gateway/calls_per_s": new["calls"] / seconds,
            "gateway/tokens_per_s": new["tokens"] / seconds,
            "gateway/added_s": added_s / max(new["requests"], 1),
            "gateway/repeated": counts["repeated"],
            "gateway/refused": counts["refused"],
            "gateway/lost": counts["lost"],
        }

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._loop.set_result(asyncio.get_running_loop())
        yield
        for client in self._clients.values():
            await client.close()

    def _apply(self, messages: Sequence[Message]) -> None:
        for message in messages:
            event = to_event(message, SCHEMAS)
            if event.topic == topology.SERVERS:
                apply_server_event(event, self._clients.values(), self._began)
            elif event.topic == topology.DEMAND:
                self._apply_demand(event.record)
            elif isinstance(event.record, Record):
                self._apply_record(topology.subject_of(event.topic), event.key, event.record)
            elif event.record is not None:
                place = f"{message.topic}[{message.partition}]@{message.offset}"
                logger.warning("%s is not read: %s", place, event.record.cause)

    def _apply_events(self, events: Sequence[Event]) -> None:
        """Apply records of sessions that were open when the assembler wrote its last snapshot."""
        for event in events:
            if isinstance(event.record, Record):  # retention may have deleted it
                self._apply_record(topology.subject_of(event.topic), event.key, event.record)

    def _apply_record(self, env: str, key: str, record: Record) -> None:
        """Apply a record of turns.<env>. The assembler puts a session's start aside where it has
        another key or env than its own, so it must not be open here either.
        """
        if isinstance(record, SessionStart) and (record.environment, record.session) != (env, key):
            return
        self._index.apply(env, record)

    def _apply_demand(self, record: object) -> None:
        if isinstance(record, Demand) and record.environment in self._limits:
            self._limits[record.environment].demand = record

    def _on_session_end(self, session: LiveSession) -> None:
        calls = session.tree.calls.values()
        tokens = sum(len(call.prompt) + len(call.tokens) for call in calls)
        self._limits[session.env].on_session_end(tokens)


def rewards_of(run: RunFile, env: str) -> Sequence[str]:
    """The names of the rewards that a session of the env waits for."""
    sessions = run.envs[env].sessions
    return sessions.rewards if sessions is not None else ()


def make_limit(run: RunFile, env: str) -> SessionLimit:
    """The flow control of an env. Until a session has ended, it is taken to be of two answers."""
    settings = run.envs[env]
    assert settings.sessions is not None
    return SessionLimit(settings.sessions.max_open, mean_tokens=2.0 * settings.max_tokens)
