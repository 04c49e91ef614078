"""Asks a model that a pool of the run serves one question at a time, and asks again if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from streamrl.config.sections.envs import FreelySampled
from streamrl.inference.clients.chat_endpoint import CUT_OFF, NoUsableAnswer, spaced
from streamrl.inference.clients.client import Client, SamplingFailed, SamplingRejected
from streamrl.system.errors import describe_error

T = TypeVar("T")


@dataclass(kw_only=True)
class PoolEndpoint:
    """Asks the servers of a pool, and reads their answers. `client` has to be set before."""

    pool: str
    attempts: int  # for a question
    timeout_s: float  # of one attempt, including the time until a server is ready
    pause_s: float  # before the second attempt; each later one waits twice as long
    temperature: float
    max_tokens: int
    client: Client | None = None

    async def ask(self, question: str, read: Callable[[str], T]) -> T:
        """Ask the model a question, and return what `read` makes of its answer.

        An answer for which it raises ValueError counts as none. Raises NoUsableAnswer once all
        attempts have failed.
        """
        cause = ""
        async for _ in spaced(self.attempts, self.pause_s):
            try:
                async with asyncio.timeout(self.timeout_s):
                    answer = await self._answer(question)
                return read(answer)
            except TimeoutError:
                cause = f"no server answered within {self.timeout_s:g} s"
            except SamplingRejected as error:
                cause = describe_error(error)
                break
            except (SamplingFailed, ValueError) as error:
                cause = describe_error(error)
        raise NoUsableAnswer(f"pool {self.pool}: {cause}")

    async def _answer(self, question: str) -> str:
        assert self.client is not None, "a pool is asked only when connected"
        messages = [{"role": "user", "content": question}]
        (sampled,) = await self.client.sample(messages, 1, self._settings())
        if sampled.finish_reason == "length":
            raise ValueError(CUT_OFF)
        return sampled.text

    def _settings(self) -> FreelySampled:
        """The settings of sampling. At temperature 0 the likeliest token is taken each time."""
        is_greedy = self.temperature == 0
        return FreelySampled(
            temperature=1.0 if is_greedy else self.temperature,
            top_k=1 if is_greedy else -1,
            max_tokens=self.max_tokens,
            timeout_s=self.timeout_s,
            attempts=1,
        )
