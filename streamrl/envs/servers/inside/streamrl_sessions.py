"""Poses the problems of an env, and plays each of them as sessions of the gateway.

This runs in the env's own Python, which does not have streamrl: it uses the standard library, and
is found by PYTHONPATH, which is why its name is long. Your program that is the `kind` of
an env ends with

    serve(make_env)

where `make_env` is called with the `Settings` and gives a `SessionEnv`. `streamrl_verifiers.py` is
one.
"""

from __future__ import annotations

import asyncio
import ctypes
import http.client
import json
import math
import os
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

SETTINGS = "STREAMRL_SERVER"  # the environment variable that has the settings, as JSON
KEY_DESCRIPTOR = "STREAMRL_KEY_DESCRIPTOR"  # the one that has the number of the pipe with the key
PR_SET_DUMPABLE = 4  # linux/prctl.h
LEFT = "the env's server ended in the middle of it"  # why the sessions of an earlier process fail
GONE_S = 60.0  # The gateway may be away for so long, while it is started again.
ANSWER_S = 60.0  # It answers within so long, unless it has to sample.
PAUSE_S = 0.2  # before a request is repeated; before a session, for each that failed in a row
MAX_PAUSE_S = 2.0
MAX_CAUSE = 500  # characters


@dataclass(frozen=True)
class Settings:
    """What the run file sets for this server."""

    env: str
    server: str  # its name, which no other server of the run has
    target: str  # what follows the first colon of the env's kind
    params: dict[str, Any]
    seed: int
    index: int  # of this server
    servers: int  # that the env has; server i poses every n-th problem
    group_size: int  # sessions of a problem
    max_sessions: int  # at a time
    session_limit_s: float
    rewards: list[str]  # names that a rollout waits for; empty: `reward`, whatever it consists of
    gateway: str  # its address


@dataclass(frozen=True)
class Session:
    """A session that has begun. Whatever takes a base URL and an API key samples in it, and does
    nothing else.
    """

    session_id: str
    api_key: str
    base_url: str  # of OpenAI's APIs
    anthropic_base_url: str


@dataclass(frozen=True)
class Outcome:
    """What a session has earned, by the name of the reward. The sum is what trains, unless the run
    file has weights.
    """

    rewards: dict[str, float]
    truncation: str = ""  # the limit that has ended it: turns, context or time


class Failed(Exception):
    """There is nothing to train on. The message has the cause."""


class SessionEnv(Protocol):
    """An env, as it is served."""

    # What made its rollouts, for instance {"package": "verifiers", "version": "0.4.0"}.
    source: dict[str, str]
    problems: int  # how many there are; 0: they never end

    async def play(self, problem: int, session: Session) -> Outcome:
        """Let the policy work on a problem. Whatever this raises makes the session fail."""
        ...


MakeEnv = Callable[[Settings], AbstractAsyncContextManager[SessionEnv]]


def serve(make_env: MakeEnv) -> None:
    """Pose problems until this process is ended."""
    hide_memory()
    settings = Settings(**json.loads(os.environ[SETTINGS]))
    gateway = GatewayClient(settings.gateway, read_key())
    asyncio.run(SessionServer(settings, gateway).run(make_env))


def read_key() -> str:
    """The key that opens sessions, from the pipe that the part has handed over. It is read once, so
    that no process which an env starts can read it again.
    """
    with open(int(os.environ.pop(KEY_DESCRIPTOR)), "rb") as pipe:
        return pipe.read().decode()


def hide_memory() -> None:
    """Keep other processes of this user, such as those that an env starts for the policy, from
    reading the memory of this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


class GatewayRefused(Exception):
    """The gateway does not do what it is asked for, or is gone. The message has the cause."""


@dataclass
class GatewayClient:
    """Sends a server's requests to the gateway."""

    url: str
    key: str

    async def post(self, path: str, body: dict[str, Any], key: str = "") -> Any:
        """The gateway's answer to a request without which the server cannot continue. Raises
        SystemExit if it is refused.
        """
        try:
            return await self.ask(path, body, key or self.key)
        except GatewayRefused as error:
            raise SystemExit(str(error)) from None

    async def ask(
        self, path: str, body: dict[str, Any], key: str, limit_s: float = ANSWER_S
    ) -> Any:
        """Send a request, and send it again while the gateway has no room or is away: it knows what
        it has done already. `limit_s`: of one answer. Raises GatewayRefused.
        """
        gone_s = time.monotonic() + GONE_S
        attempt = -1
        while True:
            attempt += 1
            try:
                return await asyncio.to_thread(self._post, path, body, key, attempt, limit_s)
            except urllib.error.HTTPError as error:
                text = error.read().decode("utf-8", "replace")
                if error.code in (429, 503):
                    gone_s = time.monotonic() + GONE_S
                elif error.code < 500 or time.monotonic() > gone_s:
                    raise GatewayRefused(f"{self.url}{path}: {error.code} {text}") from None
            except (OSError, http.client.HTTPException) as error:  # also amid its answer
                if time.monotonic() > gone_s:
                    raise GatewayRefused(f"the gateway {self.url} is gone ({error})") from None
            await asyncio.sleep(PAUSE_S)

    def _post(self, path: str, body: dict[str, Any], key: str, attempt: int, limit_s: float) -> Any:
        headers = {"Content-Type": "application/json", "x-stainless-retry-count": str(attempt)}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=limit_s) as response:
            return json.load(response)


@dataclass
class SessionServer:
    """One process of an env."""

    settings: Settings
    gateway: GatewayClient
    # Sets its groups and sessions apart from those of earlier processes.
    begun: str = field(default_factory=lambda: f"{time.time_ns():x}")
    failed_in_a_row: int = 0  # sessions

    async def run(self, make_env: MakeEnv) -> None:
        settings = self.settings
        left = {"env": settings.env, "server": settings.server, "failure": LEFT}
        await self.gateway.post("/rl/end_sessions", left)
        async with make_env(settings) as env:
            room = asyncio.Semaphore(settings.max_sessions)
            async with asyncio.TaskGroup() as playing:
                for number, problem in enumerate(problems(env.problems, settings, self.begun)):
                    for sample in range(settings.group_size):
                        await room.acquire()
                        await asyncio.sleep(min(self.failed_in_a_row * PAUSE_S, MAX_PAUSE_S))
                        session, grading_key = await self._start(env, number, problem, sample)
                        task = playing.create_task(self._play(env, problem, session, grading_key))
                        task.add_done_callback(lambda task: room.release())

    async def _start(
        self, env: SessionEnv, number: int, problem: int, sample: int
    ) -> tuple[Session, str]:
        """Begin a session as soon as the gateway wants one. Its second value is the key that grades
        the session, which the env's code does not get.
        """
        settings = self.settings
        group = f"{settings.server}-{self.begun}-{number}"
        body = {
            "env": settings.env,
            "task_id": str(problem),
            "group_id": group,
            "session_id": f"{group}-{sample}",
            "metadata": {**env.source, "server": settings.server},
        }
        begun = await self.gateway.post("/rl/start_session", body)
        grading_key = begun.pop("grading_key")
        return Session(**begun), grading_key

    async def _play(
        self, env: SessionEnv, problem: int, session: Session, grading_key: str
    ) -> None:
        try:
            outcome = await asyncio.wait_for(
                env.play(problem, session), self.settings.session_limit_s
            )
            rewards = chosen(outcome.rewards, self.settings.rewards)
            truncation = limit_of(outcome.truncation)
        except TimeoutError:
            cause = f"it took longer than {self.settings.session_limit_s:g} s"
            await self._fail(session, grading_key, cause)
        except Failed as error:
            await self._fail(session, grading_key, str(error))
        except Exception as error:  # the env is another author's code
            await self._fail(session, grading_key, f"{type(error).__name__}: {error}")
        else:
            await self._grade(session, grading_key, rewards, truncation)

    async def _grade(
        self, session: Session, grading_key: str, rewards: dict[str, float], truncation: str
    ) -> None:
        """Set the rewards of a session and end it. It fails if the gateway refuses one of them."""
        try:
            for name, reward in rewards.items():
                body = {"name": name, "reward": reward}
                await self.gateway.ask("/rl/set_reward", body, grading_key)
        except GatewayRefused as error:
            await self._fail(session, grading_key, str(error))
            return
        self.failed_in_a_row = 0
        await self.gateway.post("/rl/end_session", {"truncation": truncation}, grading_key)

    async def _fail(self, session: Session, grading_key: str, cause: str) -> None:
        self.failed_in_a_row += 1
        # A cause may quote anything, also what no UTF-8 has.
        failure = cause[:MAX_CAUSE].encode("utf-8", "replace").decode()
        print(f"session {session.session_id} fails: {escaped(failure)}", flush=True)
        await self.gateway.post("/rl/end_session", {"failure": failure}, grading_key)


def escaped(text: str) -> str:
    """The text in one line, without characters that a terminal would obey."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def problems(number: int, settings: Settings, begun: str) -> Iterator[int]:
    """The problems of this server among so many, in another order each epoch. 0: they never end,
    and come in their own order.
    """
    if not number:
        yield from count(settings.index, settings.servers)
    if settings.index >= number:
        raise SystemExit(f"{number} problems are too few for {settings.servers} servers of an env")
    for epoch in count():
        order = list(range(settings.index, number, settings.servers))
        random.Random(f"{settings.seed}-{begun}-{epoch}").shuffle(order)
        yield from order


def chosen(rewards: dict[str, float], names: list[str]) -> dict[str, float]:
    """The rewards that a rollout waits for; without names their sum, as `reward`. Raises Failed if
    one is missing, or is no number.
    """
    if not names:
        values = [finite(name, value) for name, value in rewards.items()]
        return {"reward": finite("the sum of all", sum(values))}
    missing = [name for name in names if name not in rewards]
    if missing:
        raise Failed(
            f"there is no reward {missing[0]!r} (sessions.rewards); there are"
            f" {', '.join(rewards) or 'none'}"
        )
    return {name: finite(name, rewards[name]) for name in names}


def limit_of(truncation: Any) -> str:
    """The limit that has ended a session. Raises Failed for what the gateway would refuse."""
    if not isinstance(truncation, str):
        raise Failed(
            f"truncation is {truncation!r}; it names the limit that ended the session, or is empty"
        )
    return truncation


def finite(name: str, value: Any) -> float:
    """The value of a reward, which an env may have as any kind of number. Raises Failed for what
    the gateway would refuse.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Failed(f"reward {name!r} is {value!r}, which is no finite number")
    return number
