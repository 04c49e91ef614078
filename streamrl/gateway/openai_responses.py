"""OpenAI's responses: a request's body to a `ChatRequest`, an answer to a response.

A request with `previous_response_id` goes on from the conversation of that response. Instructions
that it gives replace those of that conversation; without any, those of before stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.gateway.openai_chat import renamed_role
from streamrl.gateway.requests import (
    Answer,
    Body,
    ChatRequest,
    Dialect,
    RequestRejected,
    canonical_messages,
    chat_tool,
    integer,
    objects,
    openai_error,
    refuse_fields,
    rejection,
    string,
    tool_objects,
)
from streamrl.records import ModelCall
from streamrl.sessions.call_tree import CallTree, visible_text
from streamrl.sessions.messages import Message

NEUTRAL = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
ID = "resp_"


def parse(body: Body, tree: CallTree) -> ChatRequest:
    refuse_fields(body, NEUTRAL)
    string(body, "model")
    text = body.get("text")
    if isinstance(text, dict) and text.get("format") not in (None, {"type": "text"}):
        raise rejection("text.format", "the policy is trained on what it samples, which is text")
    return ChatRequest(
        messages=canonical_messages(_conversation(body, tree), "input"),
        tools=_tools(body),
        reads_tool_calls=body.get("tool_choice") != "none",
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        max_tokens=integer(body, "max_output_tokens", 0),
    )


def _conversation(body: Body, tree: CallTree) -> list[Message]:
    """The whole conversation: with that of `previous_response_id`, and with `instructions`. Raises
    RequestRejected.
    """
    instructions = string(body, "instructions", limit=1 << 30)
    system: list[Message] = []
    if instructions:
        system = [{"role": "system", "content": instructions}]
    earlier: list[Message] = []
    previous = string(body, "previous_response_id")
    if previous:
        call = previous.removeprefix(ID)
        if call not in tree.calls:
            raise RequestRejected(
                400,
                f"previous_response_id: this session has no response {previous}",
                "previous_response_id",
                "previous_response_not_found",
            )
        earlier = tree.visible_conversation(call)
        if system and earlier[0]["role"] == "system":
            earlier = earlier[1:]
    text = body.get("input")
    items = [{"role": "user", "content": text}] if isinstance(text, str) else None
    return [*system, *earlier, *messages_of(items or objects(body, "input"))]


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The items of an input as chat messages. A message of the assistant and the calls of functions
    that follow it are one message, as they were one answer.
    """
    messages = list[Message]()
    for item in items:
        match item:
            case {"type": "function_call"}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": str(call_id)}:
                output = item.get("output")
                messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
            case {"type": "reasoning"}:
                pass  # no server of ours makes any
            case {"role": str()} if item.get("type", "message") == "message":
                role = renamed_role(item)["role"]
                messages.append({"role": role, "content": item.get("content")})
            case _:
                raise rejection("input", f"items of type {item.get('type')!r} are not known")
    return messages


def _tools(body: Body) -> list[dict[str, Any]]:
    tools = tool_objects(body)
    for tool in tools:
        if tool.get("type") != "function":
            raise rejection("tools", f"{tool.get('type')!r} is run by OpenAI; give functions")
    return [
        chat_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))
        for tool in tools
    ]


def response(body: Body, answer: Answer) -> dict[str, Any]:
    call = answer.calls[0]
    cut_off = call.inference_metadata.finish_reason == "length"
    prompt_tokens = len(answer.prompt)
    finished: dict[str, Any] = {
        "id": ID + call.call,
        "object": "response",
        "created_at": int(call.time_s),
        "status": "incomplete" if cut_off else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": string(body, "model", "policy"),
        "output": _items(call, "incomplete" if cut_off else "completed"),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": call.inference_metadata.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": call.inference_metadata.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + answer.sampled_tokens,
        },
    }
    if body.get("return_token_ids"):
        finished["prompt_token_ids"] = answer.prompt.tolist()
        finished["token_ids"] = call.tokens.tolist()
    return finished


def _items(call: ModelCall, status: str) -> list[dict[str, Any]]:
    """The text of an answer as a message, then its calls of functions."""
    text = visible_text(call)
    items = list[dict[str, Any]]()
    if text or not call.tool_calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{call.call}",
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [part],
            }
        )
    for index, tool_call in enumerate(call.tool_calls):
        items.append(
            {
                "id": f"fc_{call.call}_{index}",
                "type": "function_call",
                "status": status,
                "call_id": tool_call["id"],
                "name": tool_call["function"]["name"],
                "arguments": tool_call["function"]["arguments"],
            }
        )
    return items


def events(body: Body, finished: dict[str, Any]) -> list[tuple[str, Any]]:
    """The events of a stream: how each item of the output comes to be."""
    begun = {**finished, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    stream: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(finished["output"]):
        events_of = _message_events if item["type"] == "message" else _function_events
        stream += [{**event, "output_index": index} for event in events_of(item)]
    stream.append({"type": f"response.{finished['status']}", "response": finished})
    return [
        (event["type"], {**event, "sequence_number": number}) for number, event in enumerate(stream)
    ]


def _message_events(item: dict[str, Any]) -> list[dict[str, Any]]:
    part = item["content"][0]
    at = {"item_id": item["id"], "content_index": 0}
    text = part["text"]
    return [
        {
            "type": "response.output_item.added",
            "item": {**item, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []},
        {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "item": item},
    ]


def _function_events(item: dict[str, Any]) -> list[dict[str, Any]]:
    at = {"item_id": item["id"]}
    done = {"arguments": item["arguments"], "name": item["name"]}
    return [
        {
            "type": "response.output_item.added",
            "item": {**item, "status": "in_progress", "arguments": ""},
        },
        {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]},
        {"type": "response.function_call_arguments.done", **at, **done},
        {"type": "response.output_item.done", "item": item},
    ]


DIALECT = Dialect(parse, response, events, openai_error)
