"""A reward that a model gives: a judge in a pool of the run, or behind any OpenAI endpoint.

The model is asked for a score in its own words, and the score is read from its answer. An answer
without a score, or with one outside the range, is asked for again. There is no reward if all
attempts fail, and so the rollout fails: a judge that is away, or talks nonsense, never gives 0.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from streamrl.config.secrets import resolve_reference
from streamrl.envs.api import Completion, Problem
from streamrl.envs.engine.time_limits import acquired
from streamrl.inference.chat_endpoint import ChatEndpoint
from streamrl.inference.client import Client
from streamrl.inference.pool_endpoint import PoolEndpoint
from streamrl.sessions.messages import joined_text

PROMPT = """Judge the answer to a question.

Question:
{question}

Answer:
{completion}

Say in a sentence what is right and wrong with it. Then write on a line of its own: Score: N, where
N is a number from 0 (useless) to 10 (perfect)."""
SCORE = r"(?i)score:\s*\**\s*(-?\d+(?:\.\d+)?)"
PLACEHOLDER = re.compile(r"\{(question|answer|completion|conversation)\}")


class Judge:
    """A reward between 0 and 1: the last score in the judge's answer, from `low` to `high`.

    `prompt` may contain {question}, {answer} (the problem's), {completion} (what the policy said
    last) and {conversation}. `score` is a regular expression whose first group is the score.
    `pool`: the pool of the run that is asked; without one `model` is asked at `base_url`, with
    `api_key`, which is env:NAME. `env_timeout_s` of the run file has to allow for all `attempts`.
    """

    def __init__(
        self,
        base_url: str = "",
        model: str = "",
        api_key: str = "",
        prompt: str = PROMPT,
        score: str = SCORE,
        low: float = 0.0,
        high: float = 10.0,
        attempts: int = 3,
        timeout_s: float = 8.0,
        pause_s: float = 0.5,
        concurrency: int = 16,
        temperature: float = 0.0,
        max_tokens: int = 512,
        pool: str = "",
    ) -> None:
        if bool(pool) == bool(base_url and model) or (pool and api_key):
            raise ValueError("a judge has a pool, or a base_url and a model")
        if not low < high:
            raise ValueError(f"low {low:g} is not below high {high:g}")
        if attempts < 1 or concurrency < 1 or timeout_s <= 0:
            raise ValueError(
                f"attempts {attempts}, concurrency {concurrency}, timeout_s {timeout_s:g}: need at"
                " least 1, 1, and more than 0"
            )
        if not PLACEHOLDER.search(prompt):
            raise ValueError("the prompt shows the judge nothing; put {completion} into it")
        self.prompt = prompt
        self.score = re.compile(score)
        if self.score.groups < 1:
            raise ValueError(f"score {score!r} has no group that is the number")
        self.low = low
        self.high = high
        self.pool = pool
        if pool:
            self._endpoint = PoolEndpoint(
                pool=pool,
                attempts=attempts,
                timeout_s=timeout_s,
                pause_s=pause_s,
                temperature=temperature,
                max_tokens=max_tokens,
            )
        else:
            self._endpoint = ChatEndpoint(
                base_url=base_url,
                model=model,
                api_key=resolve_reference(api_key, "api_key"),
                attempts=attempts,
                timeout_s=timeout_s,
                pause_s=pause_s,
                options={"temperature": temperature, "max_tokens": max_tokens},
            )
        self._free = asyncio.Semaphore(concurrency)

    async def __call__(
        self, problem: Problem, completion: Completion, earned: Mapping[str, float]
    ) -> float:
        question = self.question(problem, completion)
        async with acquired(self._free):
            score = await self._endpoint.ask(question, self.read_score)
        return (score - self.low) / (self.high - self.low)

    def connect(self, client: Client) -> None:
        """Ask the servers that `client` knows. It is called for a judge in a pool."""
        assert isinstance(self._endpoint, PoolEndpoint)
        self._endpoint.client = client

    async def close(self) -> None:
        if isinstance(self._endpoint, ChatEndpoint):
            await self._endpoint.close()

    def question(self, problem: Problem, completion: Completion) -> str:
        """What the judge is asked. What the policy said is put in as it is, placeholders too."""
        values: dict[str, Any] = {
            "question": joined_text(problem.messages),
            "answer": problem.answer,
            "completion": completion.text,
            "conversation": joined_text(completion.messages),
        }
        return PLACEHOLDER.sub(lambda match: str(values[match.group(1)]), self.prompt)

    def read_score(self, answer: str) -> float:
        """The last score that the answer names. Raises ValueError if there is none in the range."""
        scores = [match.group(1) for match in self.score.finditer(answer)]
        if not scores:
            raise ValueError(f"no score in {answer[:80]!r}")
        score = float(scores[-1])
        if not self.low <= score <= self.high:
            raise ValueError(f"score {score:g} is not from {self.low:g} to {self.high:g}")
        return score
