"""Asks a model at any OpenAI endpoint one question at a time, and asks again if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import openai

from streamrl.system.errors import describe_error

T = TypeVar("T")

# Another attempt would be refused in the same way.
REFUSED = (400, 401, 403, 404, 422)
# An answer that is cut off has not come to its end, whatever is in it.
CUT_OFF = "its answer was cut off; raise max_tokens, unless its provider filters"


class NoUsableAnswer(Exception):
    """The model has not answered, or its answer cannot be used; the message has the cause."""


async def spaced(attempts: int, pause_s: float) -> AsyncIterator[int]:
    """The numbers of the attempts. A pause of `pause_s` comes before the second one, and each later
    pause is twice as long.
    """
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(pause_s * 2 ** (attempt - 1))
        yield attempt


@dataclass
class ChatEndpoint:
    """Asks a model, and reads its answers."""

    base_url: str
    model: str
    api_key: str
    attempts: int  # for a question
    timeout_s: float  # of one attempt
    pause_s: float  # before the second attempt; each later one waits twice as long
    options: dict[str, Any]  # of the request, as temperature and max_tokens
    _client: openai.AsyncOpenAI | None = field(default=None, init=False)

    async def ask(self, question: str, read: Callable[[str], T]) -> T:
        """Ask the model a question, and return what `read` makes of its answer.

        An answer for which it raises ValueError counts as none. Raises NoUsableAnswer once all
        attempts have failed.
        """
        cause = ""
        async for _ in spaced(self.attempts, self.pause_s):
            try:
                return read(await self._answer(question))
            except openai.APIStatusError as error:
                cause = describe_error(error)
                if error.status_code in REFUSED:
                    break
            except (openai.OpenAIError, ValueError) as error:
                cause = describe_error(error)
        raise NoUsableAnswer(f"{self.model} at {self.base_url}: {cause}")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _answer(self, question: str) -> str:
        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=self.base_url,
                api_key=self.api_key or "none",  # the library wants one
                max_retries=0,
                timeout=self.timeout_s,
            )
        options: Any = self.options
        completion: Any = await self._client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": question}], **options
        )
        try:
            choice = completion.choices[0]
            text = choice.message.content
        except (AttributeError, IndexError, TypeError) as error:
            raise ValueError("its answer is no chat completion") from error
        if choice.finish_reason in ("length", "content_filter"):
            raise ValueError(CUT_OFF)
        if not isinstance(text, str):
            raise ValueError("its answer has no text")
        return text
