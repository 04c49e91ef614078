"""One rollout under way: who asks the policy, what it says, and what ends the conversation.

A limit that is reached ends a rollout truncated, with what was said so far: the tokens of a turn,
the number of turns, the context, the time, or a reply of the env that fails or takes too long. Once
it is over the policy is not asked again, whatever the env does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from streamrl.config import run_file
from streamrl.envs.api import AgentLoopEnv, BaseEnv, Message, MultiTurnEnv, Problem, Tool, Truncated
from streamrl.envs.engine.time_limits import (
    TimeLimitExceeded,
    in_thread,
    is_coroutine,
    with_time_limit,
)
from streamrl.envs.engine.transcript import Transcript
from streamrl.errors import describe_error
from streamrl.inference.client import ContextFull, Sampled, SamplingFailed, TimedOut


class Sampler(Protocol):
    """What `inference.client.Client` can do for an env."""

    async def sample(
        self,
        messages: list[Message],
        n: int,
        env: run_file.Env,
        tools: Sequence[Tool] = (),
        history: Sequence[int] = (),
        last: str = "",
    ) -> list[Sampled]: ...


class FirstRequest:
    """The first answers to a problem: one request for all of its rollouts, which is made when the
    first of them asks.
    """

    def __init__(self, problem: Problem, n: int, settings: run_file.Env, sampler: Sampler) -> None:
        self.problem = problem
        self._n = n
        self._settings = settings
        self._sampler = sampler
        self._request: asyncio.Task[list[Sampled]] | None = None

    async def answers(self) -> list[Sampled]:
        """One answer for each rollout. Raises SamplingFailed."""
        if self._request is None:
            self._request = asyncio.create_task(self._sample())
        # a rollout that is cancelled does not cancel the request of the others
        return await asyncio.shield(self._request)

    async def close(self) -> None:
        """Cancel the request if it is under way."""
        if self._request is not None:
            self._request.cancel()
            await asyncio.gather(self._request, return_exceptions=True)

    async def _sample(self) -> list[Sampled]:
        problem = self.problem
        if problem.tokens:
            return await self._sampler.sample([], self._n, self._settings, (), problem.tokens)
        messages = list(problem.messages)
        return await self._sampler.sample(messages, self._n, self._settings, problem.tools)


@dataclass
class RolloutSession:
    """One rollout: its transcript, the notes of the env, and how it has ended."""

    index: int  # in its group
    first_request: FirstRequest
    settings: run_file.Env
    sampler: Sampler
    transcript: Transcript
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    failure: str = ""  # why there is nothing to train on
    _over: bool = False
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, env: BaseEnv) -> None:
        """Have the conversation, to whatever end it comes."""
        limit = asyncio.timeout(self.settings.rollout_timeout_s)
        try:
            async with limit:
                if isinstance(env, AgentLoopEnv):
                    await env.converse(self.first_request.problem, self.ask, self.notes)
                else:
                    await self._take_turns(env)
        except Truncated as cause:
            self._end(cause.limit, cause.note)
        except Exception as error:  # an env is somebody else's code
            if limit.expired():
                self._end("time")
            else:
                self._end("tool-error", describe_error(error))
        if not self.transcript.samples and not self.failure:
            reason = self.transcript.note or self.transcript.truncation
            self.failure = reason or "the env ended it before the policy was asked"

    async def ask(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Sampled:
        """Ask the policy (`api.PolicyClient`). Requests of one rollout follow one another, so that
        each goes on from the one before.
        """
        async with self._asking:
            if not self._over and len(self.transcript.samples) >= self.settings.max_turns:
                self._end("turns")
            if self._over:
                reason = self.failure or self.transcript.truncation
                raise SamplingFailed(f"the rollout is over ({reason})")
            try:
                sampled = await self._sample(list(messages), list(tools))
                self._append(list(messages), sampled)
            except ContextFull as error:
                self._end("context", str(error))
                raise
            except TimedOut as error:
                self._end("time", str(error))
                raise
            except SamplingFailed as error:
                self._fail(str(error))
                raise
            except Exception as error:
                self._fail(describe_error(error))
                raise
            return sampled

    async def _take_turns(self, env: BaseEnv) -> None:
        """The conversation of an env that does not run it itself."""
        problem = self.first_request.problem
        await self.ask(problem.messages, problem.tools)
        while isinstance(env, MultiTurnEnv) and not self.transcript.truncation:
            replied = await self._reply(env)
            if not replied:
                return
            await self.ask([*self.transcript.messages, *replied], problem.tools)

    async def _reply(self, env: MultiTurnEnv) -> list[Message]:
        """What the env says to the policy; nothing when the conversation is over. Raises Truncated
        if the reply fails or takes too long.
        """
        arguments = (self.first_request.problem, tuple(self.transcript.messages))
        try:
            if is_coroutine(env.reply):
                work = cast(Awaitable[Any], env.reply(*arguments))
            else:
                work = in_thread(env.reply, *arguments)
            replied = await with_time_limit(work, self.settings.env_timeout_s, "a reply")
            return _checked(replied or ())
        except TimeLimitExceeded as error:
            raise Truncated("tool-time", str(error)) from error
        except Exception as error:  # a tool that fails ends the rollout, not the env
            raise Truncated("tool-error", describe_error(error)) from error

    async def _sample(self, messages: list[Message], tools: list[Tool]) -> Sampled:
        problem = self.first_request.problem
        is_first = not self.transcript.samples
        if is_first and messages == list(problem.messages) and tools == list(problem.tools):
            return (await self.first_request.answers())[self.index]
        (sampled,) = await self.sampler.sample(
            messages,
            1,
            self.settings,
            tools,
            self.transcript.history,
            self.transcript.server,
        )
        return sampled

    def _append(self, messages: list[Message], sampled: Sampled) -> None:
        """Add a request and its answer to the transcript. If it was another conversation than so
        far, all of it was asked.
        """
        known = len(self.transcript.messages)
        if messages[:known] != self.transcript.messages or len(messages) == known:
            self.transcript.messages = []
            known = 0
        self.transcript.append(messages[known:], sampled, time.time())

    def _end(self, limit: str, note: str = "") -> None:
        """End it truncated. The first limit counts; but a turn that was cut off after which the
        conversation went on is ended by what ended the conversation.
        """
        if not self._over:
            self._over = True
            self.transcript.truncation = limit
            self.transcript.note = note

    def _fail(self, cause: str) -> None:
        self._over = True
        self.failure = cause


def _checked(messages: Sequence[Any]) -> list[Message]:
    """The messages that an env replied with. Raises TypeError for what is none."""
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise TypeError(f"not a message with role and content but {message!r}")
    return [dict(message) for message in messages]
