"""Requests that begin and end sessions and set their rewards, named as in AReaL's online proxy."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.gateway.flow_control import SessionLimit
from streamrl.gateway.follower import Follower
from streamrl.gateway.keys import SESSION_ID, SessionKeys, SessionName
from streamrl.gateway.recorder import Recorder, log_timeout
from streamrl.gateway.requests import Body, RequestRejected, objects, rejection, string
from streamrl.gateway.session_index import SessionIndex
from streamrl.inference.client import Client
from streamrl.log.protocol import Output
from streamrl.records import Record, Reward, SessionEnd, SessionStart

MAX_METADATA_BYTES = 1 << 18
RETRY_AFTER_S = 1
# What responses prefix a call's id with.
ID_PREFIXES = ("chatcmpl-", "resp_", "msg_")


class SessionsApi:
    """Answers the requests about sessions themselves. The calls within them are `calls.py`'s."""

    def __init__(
        self,
        run: RunFile,
        index: SessionIndex,
        follower: Follower,
        recorder: Recorder,
        keys: SessionKeys,
        limits: Mapping[str, SessionLimit],
        clients: Mapping[str, Client],
    ) -> None:
        self._run = run
        self._index = index
        self._follower = follower
        self._recorder = recorder
        self._keys = keys
        self._limits = limits
        self._clients = clients

    async def start(self, body: Body, base_url: str, is_retry: bool) -> dict[str, Any]:
        """Begin a session, or resume one. Raises RequestRejected."""
        env = self._env_of(body)
        session_id = string(body, "session_id") or secrets.token_hex(16)
        if not SESSION_ID.fullmatch(session_id):
            raise rejection("session_id", "it has letters, digits, - and _, at most 200")
        name = SessionName(env, session_id)
        start = self._start_record(name, body)
        async with log_timeout(self._run.envs[env].timeout_s):
            await self._follower.catch_up()
        if self._index.has_ended(name):
            raise RequestRejected(409, f"session {session_id} has ended; give another session_id")
        session = self._index.sessions.get(name)
        if session is None:
            self._check_admission(env)
        elif session.start.problem_id != start.problem_id:
            raise RequestRejected(
                409, f"session {session_id} is about task {session.start.problem_id!r}", "task_id"
            )
        elif not (body.get("resume") or is_retry):
            raise RequestRejected(
                409,
                f'session {session_id} exists; send "resume": true to go on with it',
                "session_id",
            )
        if session is None or not is_retry:
            starts = self._starts(name)
            await self._write(name, start, lambda: self._starts(name) > starts)
        return {
            "session_id": session_id,
            "api_key": self._keys.key_of(env, session_id),
            "base_url": f"{base_url}/v1",
            "anthropic_base_url": base_url,
        }

    async def set_reward(self, name: SessionName, body: Body) -> dict[str, Any]:
        """Write a reward of a session, which may have ended long ago. Raises RequestRejected."""
        value = body.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
            raise rejection("reward", "it is a finite number")
        call = string(body, "interaction_id")
        for prefix in ID_PREFIXES:
            call = call.removeprefix(prefix)
        reward = Reward(
            rollout=name.session,
            name=string(body, "name") or self._reward_name(name.env),
            value=float(value),
            call=call,
            scorer=string(body, "scorer"),
            scorer_version=string(body, "scorer_version"),
            time_s=time.time(),
        )
        async with log_timeout(self._run.envs[name.env].timeout_s):
            await self._recorder.write(Output(topology.rewards(name.env), name.session, reward))
        return {"session_id": name.session, "name": reward.name, "reward": reward.value}

    async def end(self, name: SessionName, body: Body) -> dict[str, Any]:
        """End a session. One that has ended already stays as it is. Raises RequestRejected."""
        end = SessionEnd(
            session=name.session,
            failure=string(body, "failure"),
            truncation=string(body, "truncation"),
            time_s=time.time(),
        )
        async with log_timeout(self._run.envs[name.env].timeout_s):
            await self._follower.catch_up()
        if not self._index.has_ended(name):
            if name not in self._index.sessions:
                raise RequestRejected(404, f"there is no session {name.session}")
            await self._end(name, end)
        return {"session_id": name.session, "ended": True}

    async def end_sessions_of_server(self, body: Body) -> dict[str, Any]:
        """Fail the open sessions of an env server that has died: those with its name in
        `metadata.server`. Raises RequestRejected.
        """
        env = self._env_of(body)
        server = string(body, "server")
        failure = string(body, "failure")
        if not (server and failure):
            raise rejection("server", "it and `failure` are needed: whose sessions end, and why")
        async with log_timeout(self._run.envs[env].timeout_s):
            await self._follower.catch_up()
        names = [
            name
            for name, session in self._index.sessions.items()
            if name.env == env and session.start.metadata.get("server") == server
        ]
        for name in names:
            end = SessionEnd(session=name.session, failure=failure, time_s=time.time())
            await self._end(name, end)
        return {"env": env, "server": server, "ended": [name.session for name in names]}

    async def _end(self, name: SessionName, end: SessionEnd) -> None:
        await self._write(name, end, lambda: self._index.has_ended(name))

    async def _write(
        self, name: SessionName, record: Record, is_applied: Callable[[], bool]
    ) -> None:
        async with log_timeout(self._run.envs[name.env].timeout_s):
            output = Output(topology.turns(name.env), name.session, record)
            await self._recorder.write_and_wait([output], is_applied)

    def _starts(self, name: SessionName) -> int:
        """How often an agent has begun to work on the session."""
        session = self._index.sessions.get(name)
        return session.starts if session else 0

    def _env_of(self, body: Body) -> str:
        envs = self._run.session_envs
        env = string(body, "env") or (envs[0] if len(envs) == 1 else "")
        if env not in envs:
            raise rejection("env", f"name one of {', '.join(envs)}")
        return env

    def _start_record(self, name: SessionName, body: Body) -> SessionStart:
        task = body.get("task_id")
        if isinstance(task, int) and not isinstance(task, bool):
            task = str(task)
        if not isinstance(task, str) or not task or len(task) > 1_000:
            raise rejection("task_id", "it names the problem that the agent works on")
        (metadata,) = objects({"metadata": [body.get("metadata") or {}]}, "metadata")
        try:
            size = len(msgspec.msgpack.encode(metadata))
        except OverflowError:
            raise rejection("metadata", "its whole numbers have at most 64 bits") from None
        if size > MAX_METADATA_BYTES:
            raise rejection("metadata", f"it has at most {MAX_METADATA_BYTES:,} bytes")
        try:
            return SessionStart(
                session=name.session,
                environment=name.env,
                problem_id=task,
                group_id=string(body, "group_id"),
                metadata=metadata,
                time_s=time.time(),
            )
        except ValueError as error:
            raise rejection("metadata", str(error)) from None

    def _reward_name(self, env: str) -> str:
        """The name of a reward that is given none: that of the only one the env waits for."""
        sessions = self._run.envs[env].sessions
        if sessions is not None and len(sessions.rewards) == 1:
            return sessions.rewards[0]
        return "reward"

    def _check_admission(self, env: str) -> None:
        """Raises RequestRejected if a new session has to wait for others, or for a server."""
        cause = self._limits[env].refusal(self._index.count_open(env))
        if cause:
            raise RequestRejected(429, f"{env}: {cause}", retry_after_s=RETRY_AFTER_S)
        pool = self._run.envs[env].pool
        if not self._clients[pool].has_server():
            raise RequestRejected(
                503, f"no server of pool {pool} is ready yet", retry_after_s=RETRY_AFTER_S
            )


def is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
