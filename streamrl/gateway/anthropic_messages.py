"""Anthropic's messages: a request's body to a `ChatRequest`, an answer to a message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.gateway.requests import (
    Answer,
    Body,
    ChatRequest,
    Dialect,
    RequestRejected,
    arguments_of,
    canonical_messages,
    chat_tool,
    integer,
    objects,
    refuse_fields,
    rejection,
    string,
    tool_objects,
)
from streamrl.sessions.call_tree import CallTree, visible_text
from streamrl.sessions.messages import Message

NEUTRAL = {
    "stop_sequences": ([],),
    "output_format": (),
    "container": (),
    "mcp_servers": ([],),
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def parse(body: Body, tree: CallTree) -> ChatRequest:
    refuse_fields(body, NEUTRAL)
    string(body, "model")
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise rejection(
            "tool_choice", "the policy decides whether it calls a tool; give auto or none"
        )
    messages = list(_system(body))
    for message in objects(body, "messages"):
        messages += _messages(message)
    if messages and messages[-1]["role"] == "assistant":
        raise rejection("messages", "the last one is the user's: the policy begins its own answers")
    return ChatRequest(
        messages=canonical_messages(messages, "messages"),
        tools=_tools(body),
        reads_tool_calls=choice["type"] == "auto",
        parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
        max_tokens=integer(body, "max_tokens", 0),
    )


def _system(body: Body) -> Iterator[Message]:
    system = body.get("system")
    if system:
        yield {"role": "system", "content": system}


def _messages(message: Mapping[str, Any]) -> Iterator[Message]:
    """A message as chat messages: the results of tools are messages of their own."""
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant"):
        raise rejection("messages", "each has the role user or assistant")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts = list[Any]()
    calls = list[dict[str, Any]]()
    for block in objects(message, "content"):
        match block:
            case {"type": "tool_result", "tool_use_id": str(call)} if role == "user":
                result = block.get("content")
                yield {"role": "tool", "content": result, "tool_call_id": call}
            case {"type": "tool_use", "id": str(call), "name": str(name), "input": dict(values)}:
                function = {"name": name, "arguments": json.dumps(values)}
                calls.append({"id": call, "function": function})
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # no server of ours makes any
            case _:
                texts.append(block)
    if calls:
        yield {"role": role, "content": texts, "tool_calls": calls}
    elif texts or role == "assistant":
        yield {"role": role, "content": texts}


def _tools(body: Body) -> list[dict[str, Any]]:
    tools = tool_objects(body)
    for tool in tools:
        if tool.get("type", "custom") not in ("custom", None):
            raise rejection(
                "tools", f"{tool['type']!r} is Anthropic's own; give tools with a schema"
            )
    return [
        chat_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))
        for tool in tools
    ]


def response(body: Body, answer: Answer) -> dict[str, Any]:
    call = answer.calls[0]
    text = visible_text(call)
    content = list[dict[str, Any]]()
    if text or not call.tool_calls:
        content.append({"type": "text", "text": text})
    for tool_call in call.tool_calls:
        content.append(
            {
                "type": "tool_use",
                "id": tool_call["id"],
                "name": tool_call["function"]["name"],
                "input": arguments_of(tool_call),
            }
        )
    reason = STOP_REASONS[call.inference_metadata.finish_reason]
    message: dict[str, Any] = {
        "id": f"msg_{call.call}",
        "type": "message",
        "role": "assistant",
        "model": string(body, "model", "policy"),
        "content": content,
        "stop_reason": "tool_use" if call.tool_calls else reason,
        "stop_sequence": None,
        "usage": {"input_tokens": len(answer.prompt), "output_tokens": answer.sampled_tokens},
    }
    if body.get("return_token_ids"):
        message["prompt_token_ids"] = answer.prompt.tolist()
        message["token_ids"] = call.tokens.tolist()
    return message


def events(body: Body, message: dict[str, Any]) -> list[tuple[str, Any]]:
    """The events of a stream: the message without content, each block, and how it ended."""
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "usage": usage}
    stream: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            first = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            first = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        stream += [
            {"type": "content_block_start", "index": index, "content_block": first},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    output = {"output_tokens": message["usage"]["output_tokens"]}
    stream += [
        {"type": "message_delta", "delta": ending, "usage": output},
        {"type": "message_stop"},
    ]
    return [(event["type"], event) for event in stream]


def error(rejected: RequestRejected) -> dict[str, Any]:
    """An error as Anthropic's API writes it."""
    default = "api_error" if rejected.status >= 500 else "invalid_request_error"
    kind = ERRORS.get(rejected.status, default)
    return {"type": "error", "error": {"type": kind, "message": str(rejected)}}


DIALECT = Dialect(parse, response, events, error)
