"""The prompt of a conversation's next turn, with a real chat template behind a server's routes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from streamrl.inference.clients.prefix import Prefix
from streamrl.inference.clients.prompts import TWO_TEXTS, Conversation, make_prompt
from streamrl.inference.clients.server_connection import ServerConnection, ServerRejected
from streamrl.inference.clients.vllm_api import DetokenizeResponse, RenderResponse
from tests.support.bpe import TEMPLATE, THINKS, bpe

ANSWER = "two plus two! four"
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "world"},
]


class Server:
    """Renders and detokenizes."""

    def __init__(self, template: str) -> None:
        self.tokenizer: Any = bpe(template)
        self.asked: list[str] = []

    async def post(self, path: str, body: Any, kind: Any) -> Any:
        self.asked.append(path)
        if path == "/detokenize":
            return DetokenizeResponse(self.tokenizer.decode(body["tokens"]))
        ids = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        return RenderResponse(ids)

    def history(self, is_whole: bool = True) -> list[int]:
        """The first question and its answer."""
        prompt = self.tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True)
        said = self.tokenizer.encode(ANSWER)
        return [*prompt, *said, self.tokenizer.eos_token_id][: None if is_whole else -1]


async def prompt_of(server: Server, history: list[int], new_messages: int) -> tuple[list[int], int]:
    conversation = Conversation(TALK, Prefix(history, new_messages=new_messages), (), {})
    return await make_prompt(cast(ServerConnection, server), "policy", conversation, 9)


async def test_history_that_a_template_rewrites_is_kept_in_its_tokens():
    server = Server(THINKS)
    history = server.history()
    prompt, kept = await prompt_of(server, history, 1)
    assert kept == len(history) and prompt[:kept] == history
    assert server.tokenizer.decode(prompt[kept:]) == "\n<|user|>world<eos>\n<|assistant|>"


@pytest.mark.parametrize(
    ("is_whole", "new_messages"),
    [(True, 0), (True, len(TALK)), (False, 1)],
    ids=["not asked for", "not the history of these messages", "cut off"],
)
async def test_otherwise_the_rendering_is_the_prompt(is_whole: bool, new_messages: int):
    server = Server(THINKS)
    prompt, kept = await prompt_of(server, server.history(is_whole), new_messages)
    assert kept == 0 and "plus" not in server.tokenizer.decode(prompt)


class Demanding(Server):
    """Its template raises for an answer without a thought, as some do."""

    async def post(self, path: str, body: Any, kind: Any) -> Any:
        if any(message["content"] in TWO_TEXTS for message in body.get("messages", ())):
            raise ServerRejected("the template failed: list has no element 1")
        return await super().post(path, body, kind)


async def test_a_template_that_refuses_to_be_asked_has_rendered_the_prompt():
    server = Demanding(THINKS)
    prompt, kept = await prompt_of(server, server.history(), 1)
    assert kept == 0 and "world" in server.tokenizer.decode(prompt)


async def test_a_template_that_keeps_is_asked_once():
    server = Server(TEMPLATE)
    history = server.history()
    prompt, kept = await prompt_of(server, history, 1)
    assert kept == len(history) and prompt[:kept] == history
    assert server.asked.count("/v1/chat/completions/render") == 1
