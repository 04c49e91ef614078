"""Anthropic's messages: a request's body to a `ChatRequest`, an answer to a message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from streamrl.envs.sessions.call_tree import CallTree, visible_text
from streamrl.envs.sessions.messages import Message
from streamrl.envs.sessions.thoughts import thoughts_of
from streamrl.extensions.gateway.fields import MESSAGES, is_given_tool
from streamrl.extensions.gateway.requests import (
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
    rejection,
    string,
    tool_objects,
)
from streamrl.stream.records.compact import wide_ids

PATH = "/v1/messages"
# Claude Code names its build in a block of the system prompt, which changes from call to call.
BILLING = "x-anthropic-billing-header"
FAILED = "The tool failed."
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
    string(body, "model")
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise rejection(
            "tool_choice", "the policy decides whether it calls a tool; give auto or none"
        )
    messages = list(_system(body))
    for message in objects(body, "messages"):
        messages += _messages(message)
    return ChatRequest(
        messages=canonical_messages(messages, "messages"),
        tools=_tools(body),
        reads_tool_calls=choice["type"] == "auto",
        parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
        max_tokens=integer(body, "max_tokens", 0),
    )


def _system(body: Body) -> Iterator[Message]:
    system = body.get("system")
    if isinstance(system, list):
        system = [block for block in cast(list[Any], system) if not _is_billing(block)]
    if system:
        yield {"role": "system", "content": system}


def _is_billing(block: Any) -> bool:
    match block:
        case {"text": str(text)}:
            return text.startswith(BILLING)
        case _:
            return False


def _messages(message: Mapping[str, Any]) -> Iterator[Message]:
    """A message as chat messages: the results of tools are separate messages."""
    role = message.get("role")
    content = message.get("content")
    if role not in ("system", "user", "assistant"):
        raise rejection("messages", "each has the role user, assistant or system")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts = list[Any]()
    calls = list[dict[str, Any]]()
    thoughts = ""
    for block in objects(message, "content"):
        match block:
            case {"type": "tool_result", "tool_use_id": str(call)} if role == "user":
                yield {"role": "tool", "content": _result(block), "tool_call_id": call}
            case {"type": "tool_use", "id": str(call), "name": str(name), "input": dict(values)}:
                function = {"name": name, "arguments": json.dumps(values)}
                calls.append({"id": call, "function": function})
            case {"type": "thinking", "thinking": str(text)}:
                thoughts += text
            case {"type": "redacted_thinking"}:
                pass  # the gateway makes none
            case _:
                texts.append(block)
    if calls:
        yield {"role": role, "content": texts, "tool_calls": calls, "reasoning": thoughts}
    elif texts or role == "assistant":
        yield {"role": role, "content": texts, "reasoning": thoughts}


def _result(block: Mapping[str, Any]) -> Any:
    """The content of a tool's result. That the tool has failed is a text before it, because chat
    templates have no field for it.
    """
    content = block.get("content")
    if block.get("is_error") is not True:
        return content
    if isinstance(content, list):
        return [f"{FAILED}\n", *cast(list[Any], content)]
    return f"{FAILED}\n{content}" if content else FAILED


def _tools(body: Body) -> list[dict[str, Any]]:
    return [
        chat_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))
        for tool in tool_objects(body)
        if is_given_tool(MESSAGES, tool)
    ]


def response(body: Body, answer: Answer) -> dict[str, Any]:
    call = answer.calls[0]
    text = visible_text(call)
    content = list[dict[str, Any]]()
    thoughts = thoughts_of(call.text)
    if thoughts and shows_thoughts(body):
        content.append({"type": "thinking", "thinking": thoughts, "signature": call.call})
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
        message["token_ids"] = wide_ids(call.tokens).tolist()
    return message


def shows_thoughts(body: Body) -> bool:
    """Whether the client asks for the thoughts of an answer. Otherwise it may not know blocks of
    that type.
    """
    thinking = body.get("thinking")
    if not isinstance(thinking, dict):
        return False
    asked = cast(dict[str, Any], thinking)
    return asked.get("type") != "disabled" and asked.get("display") != "omitted"


def events(body: Body, message: dict[str, Any]) -> list[tuple[str, Any]]:
    """The events of a stream: the message without content, each block, and how it ended."""
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "usage": usage}
    stream: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        first, deltas = _parts(block)
        stream.append({"type": "content_block_start", "index": index, "content_block": first})
        stream += [
            {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
        ]
        stream.append({"type": "content_block_stop", "index": index})
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    output = {"output_tokens": message["usage"]["output_tokens"]}
    stream += [
        {"type": "message_delta", "delta": ending, "usage": output},
        {"type": "message_stop"},
    ]
    return [(event["type"], event) for event in stream]


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream begins it, and what is added to it."""
    match block:
        case {"type": "text", "text": text}:
            return {**block, "text": ""}, [{"type": "text_delta", "text": text}]
        case {"type": "thinking", "thinking": thoughts, "signature": signature}:
            return {**block, "thinking": "", "signature": ""}, [
                {"type": "thinking_delta", "thinking": thoughts},
                {"type": "signature_delta", "signature": signature},
            ]
        case _:
            written = json.dumps(block["input"])
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]


def error(rejected: RequestRejected) -> dict[str, Any]:
    """An error as Anthropic's API writes it."""
    default = "api_error" if rejected.status >= 500 else "invalid_request_error"
    kind = ERRORS.get(rejected.status, default)
    return {"type": "error", "error": {"type": kind, "message": str(rejected)}}


DIALECT = Dialect(PATH, parse, response, events, error)
