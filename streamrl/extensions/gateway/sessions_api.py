"""Requests that begin and end sessions and set their rewards, named as in AReaL's online proxy."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.keys import SESSION_ID, Key, Right, RunKeys, SessionName
from streamrl.envs.sessions.names import short_name
from streamrl.extensions.gateway.flow_control import SessionLimit
from streamrl.extensions.gateway.follower import Follower
from streamrl.extensions.gateway.recorder import Recorder
from streamrl.extensions.gateway.requests import Body, RequestRejected, objects, rejection, string
from streamrl.extensions.gateway.session_index import SessionIndex, reward_hash
from streamrl.inference.clients.client import Client
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Record, Reward, SessionEnd, SessionStart
from streamrl.stream.records.limits import MAX_ID
from streamrl.system.text import nearest_or_all

MAX_NAMED = 100_000  # characters of a task or a group; records have a hash of a long one
MAX_METADATA_BYTES = 1 << 18
MAX_CAUSE = 1_000  # characters of a failure
RETRY_AFTER_S = 1
# Time for which the keys of a session are good. The session gives new ones when it is resumed.
SESSION_KEYS_S = 7 * 86_400.0
# The fields of each request about a session.
START = ("env", "task_id", "session_id", "group_id", "metadata", "resume")
REWARD = ("reward", "name", "interaction_id")
END = ("failure", "truncation")
END_OF_SERVER = ("env", "server", "failure")
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
        keys: RunKeys,
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
        # Sessions whose first record is being written: they are open, and not in the index yet.
        self._starting = set[SessionName]()

    async def start(self, env: str, body: Body, base_url: str, is_retry: bool) -> dict[str, Any]:
        """Begin a session, or resume one. Raises RequestRejected."""
        check_fields(body, START)
        check_env(env, body)
        session_id = string(body, "session_id") or secrets.token_hex(16)
        if not SESSION_ID.fullmatch(session_id):
            raise rejection("session_id", "it has letters, digits, - and _, at most 200")
        name = SessionName(env, session_id)
        start = self._start_record(name, body)
        await self._follower.catch_up(self._run.envs[env].timeout_s)
        if self._index.has_ended(name):
            raise RequestRejected(409, f"session {session_id} has ended; give another session_id")
        session = self._index.sessions.get(name)
        if name in self._starting:
            raise RequestRejected(
                429, f"session {session_id} is being opened; ask again", retry_after_s=RETRY_AFTER_S
            )
        if session is None:
            self._check_admission(env)
        elif session.start.problem_id != start.problem_id:
            raise RequestRejected(
                409, f"session {session_id} is about task {session.start.problem_id!r}", "task_id"
            )
        elif not (body.get("resume") or is_retry):
            raise RequestRejected(
                409,
                f'session {session_id} exists; send "resume": true to continue it',
                "session_id",
            )
        if session is None or not is_retry:
            starts = self._starts(name)
            if session is None:
                self._starting.add(name)
            try:
                await self._write(name, start, lambda: self._starts(name) > starts)
            finally:
                self._starting.discard(name)
        return {
            "session_id": session_id,
            "api_key": self._key("sample", name),
            "grading_key": self._key("grade", name),
            "base_url": f"{base_url}/v1",
            "anthropic_base_url": base_url,
        }

    def _key(self, right: Right, name: SessionName) -> str:
        key = Key(right, name.env, name.session)
        return self._keys.make(key, time.time(), SESSION_KEYS_S)

    async def set_reward(self, name: SessionName, body: Body) -> dict[str, Any]:
        """Write a reward of a session, which may have ended while it was judged. Raises
        RequestRejected, also where the reward came too late to count.
        """
        check_fields(body, REWARD)
        reward_name = self._reward_name(name.env, body)
        call = string(body, "interaction_id", limit=MAX_ID)
        for prefix in ID_PREFIXES:
            call = call.removeprefix(prefix)
        reward = Reward(
            rollout=name.session,
            name=reward_name,
            value=self._reward_value(name.env, reward_name, body),
            call=call,
            time_s=time.time(),
        )
        await self._follower.catch_up(self._run.envs[name.env].timeout_s)
        rewards = self._index.rewards_of(name)
        if rewards is not None:
            if call and call not in rewards.calls:
                raise rejection("interaction_id", f"session {name.session} has no call {call!r}")
            if problem := rewards.progress.problem(reward):
                raise RequestRejected(409, f"session {name.session}: {problem}")
            await self._write(
                name, reward, lambda: reward in rewards.counted or rewards.is_complete
            )
        if rewards is None or reward not in rewards.counted:
            self._check_was_counted(name, reward)
        return {"session_id": name.session, "name": reward.name, "reward": reward.value}

    async def end(self, name: SessionName, body: Body) -> dict[str, Any]:
        """End a session. One that has ended already stays as it is. Raises RequestRejected."""
        check_fields(body, END)
        end = SessionEnd(
            session=name.session,
            failure=string(body, "failure", limit=MAX_CAUSE),
            truncation=string(body, "truncation", limit=MAX_ID),
            time_s=time.time(),
        )
        await self._follower.catch_up(self._run.envs[name.env].timeout_s)
        if not self._index.has_ended(name):
            if name not in self._index.sessions:
                raise RequestRejected(404, f"there is no session {name.session}")
            await self._end(name, end)
        return {"session_id": name.session, "ended": True}

    async def end_sessions_of_server(self, env: str, body: Body) -> dict[str, Any]:
        """Fail the open sessions of an env server that has died: those with its name in
        `metadata.server`. Raises RequestRejected.
        """
        check_fields(body, END_OF_SERVER)
        check_env(env, body)
        server = string(body, "server")
        failure = string(body, "failure", limit=MAX_CAUSE)
        if not (server and failure):
            raise rejection("server", "it and `failure` are needed: whose sessions end, and why")
        await self._follower.catch_up(self._run.envs[env].timeout_s)
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
        output = Output(topology.turns(name.env), name.session, record)
        limit_s = self._run.envs[name.env].timeout_s
        await self._recorder.write_and_wait([output], is_applied, limit_s)

    def _starts(self, name: SessionName) -> int:
        """How often an agent has begun to work on the session."""
        session = self._index.sessions.get(name)
        return session.starts if session else 0

    def _start_record(self, name: SessionName, body: Body) -> SessionStart:
        task = body.get("task_id")
        if isinstance(task, int) and not isinstance(task, bool):
            task = str(task)
        if not isinstance(task, str) or not task or len(task) > MAX_NAMED:
            raise rejection(
                "task_id", f"it names the problem, with at most {MAX_NAMED:,} characters"
            )
        group_id = string(body, "group_id", limit=MAX_NAMED)
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
                problem_id=short_name(task),
                group_id=short_name(group_id),
                metadata=metadata,
                time_s=time.time(),
            )
        except ValueError as error:
            raise rejection("metadata", str(error)) from None

    def _check_was_counted(self, name: SessionName, reward: Reward) -> None:
        """Raises RequestRejected unless the session's rollout, which has been made, has an equal
        reward: the request has been sent again then.
        """
        closed = self._index.closed.get(name)
        if closed is None:
            raise RequestRejected(404, f"there is no session {name.session}")
        if reward_hash(reward) not in closed:
            raise RequestRejected(
                409,
                f"session {name.session} waits for no reward any more, its rollout has been made;"
                " `streamrl rescore` rewards it now",
            )

    def _reward_name(self, env: str, body: Body) -> str:
        """The name of a reward. One that is given none is that of the only one the env waits for.
        Raises RequestRejected for another than the env waits for.
        """
        sessions = self._run.envs[env].sessions
        wanted = sessions.rewards if sessions is not None else []
        default = wanted[0] if len(wanted) == 1 else "reward"
        name = string(body, "name", limit=MAX_ID) or default
        if wanted and name not in wanted:
            raise rejection(
                "name", f"{name!r} is none of {', '.join(wanted)} (envs.{env}.sessions.rewards)"
            )
        return name

    def _reward_value(self, env: str, name: str, body: Body) -> float:
        """The value of a reward within its range. Raises RequestRejected."""
        value = body.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
            raise rejection("reward", "it is a finite number")
        sessions = self._run.envs[env].sessions
        assert sessions is not None, "its key was checked"
        lowest, highest = sessions.reward_range(name)
        if not lowest <= value <= highest:
            raise rejection(
                "reward",
                f"{name} is between {lowest:g} and {highest:g} (envs.{env}.sessions.reward_ranges)",
            )
        return float(value)

    def _check_admission(self, env: str) -> None:
        """Raises RequestRejected if a new session has to wait for others, or for a server."""
        starting = sum(name.env == env for name in self._starting)
        cause = self._limits[env].refusal(
            self._index.count_open(env) + starting, self._index.count_outstanding(env) + starting
        )
        if cause:
            raise RequestRejected(429, f"{env}: {cause}", retry_after_s=RETRY_AFTER_S)
        pool = self._run.envs[env].pool
        if not self._clients[pool].has_server():
            raise RequestRejected(
                503, f"no server of pool {pool} is ready yet", retry_after_s=RETRY_AFTER_S
            )


def check_fields(body: Body, known: Sequence[str]) -> None:
    """Raises RequestRejected for a field that the request does not have: with a misspelled
    `interaction_id` the reward of a call would be the session's.
    """
    for field, value in body.items():
        if field not in known and value is not None:
            hint = nearest_or_all(field, known)
            raise rejection(field, f"this request does not have this field; {hint}")


def check_env(env: str, body: Body) -> None:
    """Raises RequestRejected for a body that names another env than its key."""
    named = string(body, "env")
    if named and named != env:
        raise rejection("env", f"the key is for env {env}, not for {named}")


def is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
