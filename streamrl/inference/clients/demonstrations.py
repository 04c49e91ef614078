"""An answer that was written by others, as if the policy had given it: the tokens that the server's
chat template makes of it, and the logprobs that the policy gives them.

The template writes a whole conversation, and so the tokens of an answer are those that follow its
prompt, up to the one that closes every answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.inference.clients.prefix import common_suffix
from streamrl.inference.clients.prompts import TWO_TEXTS, Conversation, render, render_body
from streamrl.inference.clients.server_connection import ServerConnection
from streamrl.inference.clients.vllm_api import DetokenizeResponse, LogprobResponse, logprob_request


class UnusableDemonstration(Exception):
    """The chat template does not write this answer as a policy could give it."""


class ScoredDemonstration(NamedTuple):
    """An answer that was written by others, and how likely the policy gives it."""

    tokens: list[int]  # the token that closes it is the last one
    text: str  # of the tokens before that
    logprobs: list[float]  # of each token, at temperature 1
    version: int  # of the policy that gives these logprobs


async def score_demonstration(
    connection: ServerConnection, model: str, prompt: Sequence[int], tokens: list[int]
) -> ScoredDemonstration:
    """An answer of these tokens (`demonstrated_tokens`) after a prompt, with its logprobs."""
    whole = [*prompt, *tokens]
    text, answer = await asyncio.gather(
        _text(connection, model, tokens[:-1]),
        connection.post("/inference/v1/generate", logprob_request(model, whole), LogprobResponse),
    )
    entries = answer.prompt_logprobs[len(prompt) :]
    logprobs: list[float] = []
    for token, entry in zip(tokens, entries, strict=True):
        if entry is None or str(token) not in entry:
            raise ValueError(f"no logprob of token {token}")
        logprobs.append(entry[str(token)].logprob)
    (choice,) = answer.choices
    if not choice.weight_versions:
        raise ValueError("an answer without the version of its weights")
    version = int(choice.weight_versions[0].version)
    return ScoredDemonstration(tokens, text, logprobs, version)


async def _text(connection: ServerConnection, model: str, tokens: Sequence[int]) -> str:
    if not tokens:
        return ""
    body = {"model": model, "tokens": list(tokens)}
    return (await connection.post("/detokenize", body, DetokenizeResponse)).prompt


async def demonstrated_tokens(
    connection: ServerConnection, model: str, conversation: Conversation
) -> list[int]:
    """The tokens of the answer that a conversation is demonstrated with, and the one that closes
    it.

    Raises UnusableDemonstration; ServerRejected and RequestFailed as the server does.
    """
    body = render_body(model, conversation)

    def with_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
        messages = [*conversation.messages, answer]
        return {**body, "messages": messages, "add_generation_prompt": False}

    bodies = [body, with_answer(conversation.demonstration or {})]
    bodies += [with_answer({"role": "assistant", "content": text}) for text in TWO_TEXTS]
    rendered = await asyncio.gather(*(render(connection, each) for each in bodies))
    prompt, whole, one, other = rendered
    suffix = common_suffix(one, other)
    end = await _end_of_turn(connection, model, suffix)
    if not end:
        raise UnusableDemonstration("the chat template writes nothing after an answer to close it")
    is_after_prompt = whole[: len(prompt)] == prompt
    is_closed = whole[len(whole) - len(suffix) :] == suffix
    content = whole[len(prompt) : len(whole) - len(suffix)]
    if not (is_after_prompt and is_closed and len(whole) >= len(prompt) + len(suffix)):
        raise UnusableDemonstration(
            "the chat template does not write this answer after the prompt of its conversation"
        )
    return [*content, *end]


async def _end_of_turn(
    connection: ServerConnection, model: str, suffix: Sequence[int]
) -> list[int]:
    """The tokens after an answer up to the one that closes it, which is the first that is more
    than white space: some templates write a space or a new line before it. Empty if none is.
    """
    for count in range(1, len(suffix) + 1):
        text = await _text(connection, model, suffix[count - 1 : count])
        if text.strip():
            return list(suffix[:count])
    return []
