"""The first answers to a problem, which all rollouts of a group share a request for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from streamrl.config.sections.envs import EnvSettings
from streamrl.envs.api import Message, Problem, Tool
from streamrl.inference.clients.client import SampledCompletion
from streamrl.inference.clients.prefix import NO_PREFIX, Prefix


class Sampler(Protocol):
    """What `inference.client.Client` can do for an env."""

    async def sample(
        self,
        messages: list[Message],
        n: int,
        env: EnvSettings,
        tools: Sequence[Tool] = (),
        prefix: Prefix = NO_PREFIX,
        demonstration: Message | None = None,
    ) -> list[SampledCompletion]: ...


class FirstRequest:
    """The first answers to a problem: one request for all of its rollouts that begin now, which is
    made when the first of them asks. `rollouts`: their indexes in the group.
    """

    def __init__(
        self,
        problem: Problem,
        rollouts: Sequence[int],
        settings: EnvSettings,
        sampler: Sampler,
    ) -> None:
        self.problem = problem
        self.rollouts = rollouts
        self._settings = settings
        self._sampler = sampler
        self._request: asyncio.Task[list[SampledCompletion]] | None = None

    async def answers(self) -> list[SampledCompletion]:
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

    async def _sample(self) -> list[SampledCompletion]:
        problem = self.problem
        count = len(self.rollouts)
        if problem.tokens:
            prompt = Prefix(problem.tokens)
            return await self._sampler.sample([], count, self._settings, (), prompt)
        messages = list(problem.messages)
        return await self._sampler.sample(messages, count, self._settings, problem.tools)
