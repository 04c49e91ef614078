"""Conversations that the env leads: it asks the policy, and what was asked and said is kept here,
token for token.

Limits are those of every conversation. One that is reached ends the policy's part: whoever asks
again is refused, whatever the env makes of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.config import run_file
from streamrl.envs.api import Leads, Message, Problem, Truncated, one_line
from streamrl.envs.engine.transcript import Talk
from streamrl.inference.client import ContextFull, Sampled, SamplingFailed, TimedOut


class Sampler(Protocol):
    """As `inference.client.Client`."""

    async def sample(
        self,
        messages: list[Message],
        n: int,
        env: run_file.Env,
        tools: Sequence[Mapping[str, Any]] = (),
        history: Sequence[int] = (),
        last: str = "",
    ) -> list[Sampled]: ...


class Opening:
    """The first answers to a problem: one request for all of its rollouts, made when the first of
    them asks.
    """

    def __init__(self, problem: Problem, n: int, settings: run_file.Env, sampler: Sampler) -> None:
        self.problem, self._n, self._settings, self._sampler = problem, n, settings, sampler
        self._answers: asyncio.Task[list[Sampled]] | None = None

    async def __call__(self, index: int) -> Sampled:
        if self._answers is None:
            asked = self._sampler.sample(
                list(self.problem.messages), self._n, self._settings, self.problem.tools
            )
            self._answers = asyncio.create_task(asked)
        # whoever is cancelled, the others wait on
        return (await asyncio.shield(self._answers))[index]

    def cancel(self) -> None:
        if self._answers is not None:
            self._answers.cancel()


@dataclass
class Seat:
    """One rollout's: what the policy was asked and has said, and what the env has noted."""

    index: int
    opening: Opening
    settings: run_file.Env
    sampler: Sampler
    talk: Talk
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    failure: str = ""  # why there is nothing to train on
    _over: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Sampled:
        """As base.Ask. One at a time, so that each goes on from the one before."""
        async with self._turn:
            if not self._over and len(self.talk.samples) >= self.settings.max_turns:
                self._end("turns")
            if self._over:
                raise SamplingFailed(
                    f"the rollout is over ({self.failure or self.talk.truncation})"
                )
            try:
                sampled = await self._sample(list(messages), list(tools))
            except (ContextFull, TimedOut) as error:
                self._end("context" if isinstance(error, ContextFull) else "time", str(error))
                raise
            except SamplingFailed as error:
                self._over, self.failure = True, str(error)
                raise
            self._hear(list(messages), sampled)
            return sampled

    async def converse(self, env: Leads) -> None:
        """To its end, whichever way it ends."""
        limit = asyncio.timeout(self.settings.rollout_timeout_s)
        try:
            async with limit:
                await env.converse(self.opening.problem, self.ask, self.notes)
        except Truncated as cause:
            self._end(cause.limit, cause.note)
        except Exception as error:  # an env is somebody else's code
            if limit.expired():
                self._end("time")
            else:
                self._end("tool-error", one_line(error))
        if not self.talk.samples and not self.failure:
            self.failure = (
                self.talk.note
                or self.talk.truncation
                or "the env ended it before the policy was asked"
            )

    async def _sample(self, messages: list[Message], tools: list[Mapping[str, Any]]) -> Sampled:
        problem = self.opening.problem
        if (
            not self.talk.samples
            and messages == list(problem.messages)
            and tools == list(problem.tools)
        ):
            return await self.opening(self.index)
        history, last = (
            (self.talk.history, self.talk.samples[-1].server_id) if self.talk.samples else ([], "")
        )
        (sampled,) = await self.sampler.sample(messages, 1, self.settings, tools, history, last)
        return sampled

    def _hear(self, messages: list[Message], sampled: Sampled) -> None:
        known = self.talk.messages
        if messages[: len(known)] != known or len(messages) == len(known):
            self.talk.messages = []  # another conversation than so far: all of it was asked
        self.talk.heard(messages[len(self.talk.messages) :], sampled, time.time())

    def _end(self, limit: str, note: str = "") -> None:
        """The first limit is the one that counts; but a turn that was cut off and went on ends by
        what ended it.
        """
        if not self._over:
            self._over, self.talk.truncation, self.talk.note = True, limit, note


async def play(
    env: Leads, problem: Problem, n: int, settings: run_file.Env, sampler: Sampler
) -> list[Seat]:
    """n conversations about a problem, all at an end. Raises SamplingFailed when none of them came
    to anything.
    """
    opening = Opening(problem, n, settings, sampler)
    seats = [Seat(index, opening, settings, sampler, Talk(problem, [])) for index in range(n)]
    try:
        await asyncio.gather(*[seat.converse(env) for seat in seats])
    finally:
        opening.cancel()
    if all(seat.failure for seat in seats):
        raise SamplingFailed(seats[0].failure)
    return seats
