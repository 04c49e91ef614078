"""The prompt of a conversation: what the server's chat template makes of it, continued from the
tokens that were sampled (`prefix.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.inference.clients.prefix import Prefix, after_answer, continuation_index, with_answer
from streamrl.inference.clients.server_connection import ServerConnection, ServerRejected
from streamrl.inference.clients.vllm_api import DetokenizeResponse, RenderResponse

# Two answers by which the tokens after an answer are told from those of the answer. Not two
# letters, for which a tiny vocabulary may have one token.
TWO_TEXTS = ("a", "1")


class Conversation(NamedTuple):
    """A conversation that the policy is asked to continue."""

    messages: list[dict[str, Any]]
    prefix: Prefix
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]  # of the chat template
    # The message that answers it (`demonstrations.py`); None: the policy does.
    demonstration: Mapping[str, Any] | None = None


async def make_prompt(
    connection: ServerConnection, model: str, conversation: Conversation, max_tokens: int
) -> tuple[list[int], int]:
    """The tokens of the prompt, and how many of them are those of the prefix."""
    messages = conversation.messages
    prefix = conversation.prefix
    history = prefix.tokens
    if not messages:
        return list(history), 0
    body = render_body(model, conversation) | {"max_tokens": max_tokens}
    rendered = await render(connection, body)
    if not history:
        return rendered, 0
    place = continuation_index(history, rendered)
    if place is not None and await _is_same_text(connection, model, history, rendered[:place]):
        return [*history, *rendered[place:]], len(history)
    if 0 < prefix.new_messages < len(messages):
        following = await _after_answer(connection, body, -prefix.new_messages - 1, history[-1])
        if following is not None:
            return [*history, *following], len(history)
    return rendered, 0


def render_body(model: str, conversation: Conversation) -> dict[str, Any]:
    """The request for the tokens of a conversation."""
    body: dict[str, Any] = {"model": model, "messages": conversation.messages}
    if conversation.tools:
        # "auto" would need a parser of calls in the server; envs have theirs
        body |= {"tools": list(conversation.tools), "tool_choice": "none"}
    if conversation.variables:
        body["chat_template_kwargs"] = conversation.variables
    return body


async def render(connection: ServerConnection, body: Mapping[str, Any]) -> list[int]:
    """The tokens that the server's chat template makes of a request."""
    answer = await connection.post("/v1/chat/completions/render", body, RenderResponse)
    return answer.token_ids


async def _after_answer(
    connection: ServerConnection, body: Mapping[str, Any], answer: int, end_of_turn: int
) -> list[int] | None:
    """The tokens that the template writes after message number `answer` once `end_of_turn` has
    closed it. None if it is closed in another way, or if the template refuses such an answer.
    """
    bodies = [
        {**body, "messages": with_answer(body["messages"], answer, text)} for text in TWO_TEXTS
    ]
    try:
        one, other = await asyncio.gather(*(render(connection, body) for body in bodies))
    except ServerRejected:
        return None
    return after_answer(one, other, end_of_turn)


async def _is_same_text(
    connection: ServerConnection, model: str, one: Sequence[int], other: Sequence[int]
) -> bool:
    """Whether both token sequences detokenize to the same text."""
    if list(one) == list(other):
        return True
    texts = list[str]()
    for tokens in (one, other):
        body = {"model": model, "tokens": list(tokens)}
        answer = await connection.post("/detokenize", body, DetokenizeResponse)
        texts.append(answer.prompt)
    return texts[0] == texts[1]
