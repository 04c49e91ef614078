"""Samples the answers to a request, as model calls at their position in the session's tree."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from streamrl.config.choices import ToolSyntax
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import EnvSettings
from streamrl.envs.sessions.call_formats import ToolCall
from streamrl.envs.sessions.call_tree import CallTree, Continuation
from streamrl.envs.sessions.chat_templates import tool_syntax_of
from streamrl.envs.sessions.messages import Message, canonical_call
from streamrl.envs.sessions.model_calls import locate_answer, prefix_of, to_call
from streamrl.envs.sessions.thoughts import without_thoughts
from streamrl.envs.sessions.tool_calls import parse_answer
from streamrl.extensions.gateway.requests import ChatRequest, ParsedRequest
from streamrl.extensions.gateway.session_index import LiveSession
from streamrl.inference.clients.client import Client, SampledCompletion
from streamrl.inference.clients.prefix import Prefix
from streamrl.stream.records import ModelCall
from streamrl.system.offloading import Offloader


class VisibleAnswer(NamedTuple):
    """An answer as the agent receives it: its calls of tools, and the text without them."""

    tool_calls: list[dict[str, Any]]
    content: str | None  # None: all of the text


class CallSampler:
    """Samples with the settings of a session's env, on the servers of its pool."""

    def __init__(self, run: RunFile, clients: Mapping[str, Client], offloader: Offloader) -> None:
        self._run = run
        self._offloader = offloader
        self._clients = clients
        self._syntaxes: dict[str, ToolSyntax] = {
            env: tool_syntax_of(run, env) for env in run.session_envs
        }

    async def sample(
        self, session: LiveSession, request: ChatRequest, continuation: Continuation, name: str
    ) -> list[ModelCall]:
        """Sample one call for each of the request's answers. `name`: of the request. Raises
        SamplingFailed.
        """
        tree = session.tree
        settings, messages, prefix = self._prompt_of(session, request, continuation)
        client = self._clients[settings.pool]
        answers = await client.sample(messages, request.n, settings, request.tools, prefix)
        position = locate_answer(tree, request.messages, continuation, answers[0])
        first = secrets.token_hex(12)
        syntax = self._syntaxes[session.env]

        def call_of(choice: int, answer: SampledCompletion) -> ModelCall:
            call = f"{first}-{choice}" if choice else first
            parsed = visible_answer(answer.text, request, syntax, call)
            return to_call(
                session.start.session,
                call,
                name,
                position,
                answer,
                choice=choice,
                tool_calls=parsed.tool_calls,
                content=parsed.content,
            )

        return await self._offloader.run(
            str(session.name),
            sum(len(answer.text) for answer in answers),
            lambda: [call_of(choice, answer) for choice, answer in enumerate(answers)],
        )

    async def count_prompt_tokens(
        self, session: LiveSession, request: ChatRequest, continuation: Continuation
    ) -> int:
        """The tokens of the prompt that the request would be sampled for. Raises SamplingFailed."""
        settings, messages, prefix = self._prompt_of(session, request, continuation)
        client = self._clients[settings.pool]
        return await client.count_prompt_tokens(messages, settings, request.tools, prefix)

    def _prompt_of(
        self, session: LiveSession, request: ChatRequest, continuation: Continuation
    ) -> tuple[EnvSettings, list[Message], Prefix]:
        """The env's settings with what the request changes of them, the messages of the prompt, and
        what it continues.
        """
        settings = self._run.envs[session.env]
        if 0 < request.max_tokens < settings.max_tokens:
            settings = settings.model_copy(update={"max_tokens": request.max_tokens})
        if request.chat_template_kwargs:
            variables = {**settings.chat_template_kwargs, **request.chat_template_kwargs}
            settings = settings.model_copy(update={"chat_template_kwargs": variables})
        tree = session.tree
        prefix = prefix_of(tree, continuation)
        if not request.messages:
            return settings, [], replace(prefix, tokens=request.token_ids)
        messages = [*tree.conversation(continuation.call), *continuation.new_messages]
        return settings, messages, prefix


def continuation_of(tree: CallTree, request: ParsedRequest) -> Continuation:
    """How a request continues the tree, by its messages or else by its tokens."""
    if request.chat.messages:
        return tree.find_continuation(request.chat.messages, request.conversation_digests)
    return Continuation(tree.find_call_by_tokens(request.tokens), [])


def visible_answer(text: str, request: ChatRequest, syntax: ToolSyntax, call: str) -> VisibleAnswer:
    """An answer as the agent receives it. If one of its calls of tools cannot be read, all of it is
    text. `call`: the id of the model call.
    """
    answer = without_thoughts(text)
    all_text = VisibleAnswer([], None if answer == text else answer)
    if not request.reads_tool_calls:
        return all_text
    parsed = parse_answer(text, syntax, request.tools)
    if not parsed.calls or any(tool_call.error for tool_call in parsed.calls):
        return all_text
    tool_calls = parsed.calls if request.parallel_tool_calls else parsed.calls[:1]
    return VisibleAnswer(
        [_chat_tool_call(f"call_{call}_{i}", each) for i, each in enumerate(tool_calls)],
        without_thoughts(parsed.content),
    )


def _chat_tool_call(identity: str, tool_call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(tool_call.arguments))
    return canonical_call(
        {"id": identity, "function": {"name": tool_call.name, "arguments": arguments}}
    )
