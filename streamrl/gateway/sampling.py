"""Samples the answers to a request, as records that say where they stand in the session's tree."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from streamrl.config.run_file import RunFile
from streamrl.envs.shipped.tools import TOOL_CALL, CallSyntax, parse_calls
from streamrl.gateway.requests import ChatRequest
from streamrl.gateway.session_index import LiveSession
from streamrl.inference.client import Client
from streamrl.records import ModelCall
from streamrl.sessions.call_tree import CallTree, Continuation
from streamrl.sessions.messages import Message, canonical_call
from streamrl.sessions.model_calls import locate_answer, prefix_of, to_call

SYNTAXES: tuple[CallSyntax, ...] = ("json", "brackets")


class Reading(NamedTuple):
    """What the agent is told of an answer: the calls of tools in it, and the text without them."""

    tool_calls: list[dict[str, Any]]
    content: str | None  # None: all of the text


class CallSampler:
    """Samples with the settings of a session's env, on the servers of its pool."""

    def __init__(self, run: RunFile, clients: Mapping[str, Client]) -> None:
        self._run = run
        self._clients = clients

    async def sample(
        self, session: LiveSession, request: ChatRequest, continuation: Continuation, name: str
    ) -> list[ModelCall]:
        """Sample one call for each of the request's answers. `name`: of the request. Raises
        SamplingFailed.
        """
        settings = self._run.envs[session.env]
        if 0 < request.max_tokens < settings.max_tokens:
            settings = settings.model_copy(update={"max_tokens": request.max_tokens})
        if request.chat_template_kwargs:
            variables = {**settings.chat_template_kwargs, **request.chat_template_kwargs}
            settings = settings.model_copy(update={"chat_template_kwargs": variables})
        tree = session.tree
        prefix = prefix_of(tree, continuation)
        messages: list[Message] = []
        if request.messages:
            messages = [*tree.conversation(continuation.call), *continuation.new_messages]
        else:
            prefix = replace(prefix, tokens=request.token_ids)
        client = self._clients[settings.pool]
        answers = await client.sample(messages, request.n, settings, request.tools, prefix)
        position = locate_answer(tree, request.messages, continuation, answers[0])
        first = secrets.token_hex(12)
        syntax = cast(CallSyntax, settings.tool_syntax)
        calls = list[ModelCall]()
        for choice, answer in enumerate(answers):
            call = f"{first}-{choice}" if choice else first
            reading = read_answer(answer.text, request, syntax, call)
            calls.append(
                to_call(
                    session.start.session,
                    call,
                    name,
                    position,
                    answer,
                    choice=choice,
                    tool_calls=reading.tool_calls,
                    content=reading.content,
                )
            )
        return calls


def continuation_of(tree: CallTree, request: ChatRequest) -> Continuation:
    """How a request continues the tree, by its messages or else by its tokens."""
    if request.messages:
        return tree.find_continuation(request.messages)
    return Continuation(tree.find_call_by_tokens(np.array(request.token_ids, np.uint32)), [])


def read_answer(text: str, request: ChatRequest, syntax: CallSyntax, call: str) -> Reading:
    """The calls of tools in an answer. If one of them cannot be read, all of it is text.

    In brackets there is one tool, the first one, with one argument, its first.
    """
    if not (request.tools and request.reads_tool_calls):
        return Reading([], None)
    function = request.tools[0]["function"]
    argument = next(iter(function["parameters"].get("properties") or {}), "")
    found = parse_calls(text, syntax, function["name"], argument)
    if not found or any(tool_call.error for tool_call in found):
        return Reading([], None)
    if not request.parallel_tool_calls:
        found = found[:1]
    tool_calls = [
        canonical_call(
            {
                "id": f"call_{call}_{index}",
                "function": {"name": made.name, "arguments": json.dumps(dict(made.arguments))},
            }
        )
        for index, made in enumerate(found)
    ]
    content = TOOL_CALL.sub("", text).strip() if syntax == "json" else ""
    return Reading(tool_calls, content)
