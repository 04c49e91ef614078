"""OpenAI's responses: a request's body to a `ChatRequest`, an answer to a response.

A request with `previous_response_id` continues the conversation of that response. Instructions that
it gives replace those of that conversation; without any, the earlier ones stay. An item may be
given by its id. Both are looked up among the calls of the session, until it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from streamrl.envs.sessions.call_tree import CallTree, visible_text
from streamrl.envs.sessions.messages import Message
from streamrl.envs.sessions.thoughts import thoughts_of
from streamrl.extensions.gateway.fields import RESPONSES, is_given_tool
from streamrl.extensions.gateway.openai_chat import chat_message, reads_tool_calls
from streamrl.extensions.gateway.requests import (
    Answer,
    Body,
    ChatRequest,
    Dialect,
    UnknownCall,
    canonical_messages,
    chat_tool,
    custom_call,
    custom_tool,
    integer,
    objects,
    openai_error,
    rejection,
    string,
    text_of_custom_call,
    tool_objects,
)
from streamrl.stream.records import ModelCall
from streamrl.stream.records.compact import wide_ids

PATH = "/v1/responses"
ID = "resp_"
# What the ids of items begin with. The id of the call follows.
REASONING_ID = "rs_"
MESSAGE_ID = "msg_"
FUNCTION_ID = "fc_"
CUSTOM_ID = "ctc_"


def parse(body: Body, tree: CallTree) -> ChatRequest:
    string(body, "model")
    return ChatRequest(
        messages=canonical_messages(_conversation(body, tree), "input"),
        tools=_tools(body),
        reads_tool_calls=reads_tool_calls(body),
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
            raise UnknownCall(
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
    return [*system, *earlier, *messages_of(items or objects(body, "input"), tree)]


def messages_of(items: Iterable[Mapping[str, Any]], tree: CallTree) -> list[Message]:
    """The items of an input as chat messages. What the assistant thought, a message of it and the
    calls of functions that follow are one message, as they were one answer. Raises RequestRejected.
    """
    messages = list[Message]()
    thoughts = ""
    for item in items:
        match _item(item, tree):
            case {"type": "function_call"} as call:
                function = {"name": call.get("name"), "arguments": call.get("arguments")}
                made = {"id": call.get("call_id"), "function": function}
                _answer_of(messages, thoughts).setdefault("tool_calls", []).append(made)
            case {"type": "custom_tool_call"} as call:
                made = custom_call(call.get("call_id"), call.get("name"), call.get("input"))
                _answer_of(messages, thoughts).setdefault("tool_calls", []).append(made)
            case {"type": "function_call_output" | "custom_tool_call_output"} as given:
                if not isinstance(given.get("call_id"), str):
                    raise rejection("input", "the output of a tool has a call_id, a text")
                output = given.get("output")
                messages.append(
                    {"role": "tool", "content": output, "tool_call_id": given["call_id"]}
                )
            case {"type": "reasoning"} as reasoning:
                thoughts += _text_of_reasoning(reasoning)
                continue
            case {"role": str()} as message if message.get("type", "message") == "message":
                role = chat_message(message)["role"]
                messages.append({"role": role, "content": message.get("content")})
                if role == "assistant":
                    messages[-1]["reasoning"] = thoughts
            case _:
                raise rejection("input", f"items of type {item.get('type')!r} are not known")
        thoughts = ""
    return messages


def _answer_of(messages: list[Message], thoughts: str) -> Message:
    """The message of the assistant to which a call of a tool belongs."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", "reasoning": thoughts})
    return messages[-1]


def _text_of_reasoning(item: Mapping[str, Any]) -> str:
    """The thoughts of an item, as a response of the gateway has them."""
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list) and parts:
            found = (part.get("text") for part in cast(list[Any], parts) if isinstance(part, dict))
            return "".join(text for text in found if isinstance(text, str))
    return ""


def _item(item: Mapping[str, Any], tree: CallTree) -> Mapping[str, Any]:
    """The item itself, where a request gives its id only. Raises RequestRejected."""
    identity = item.get("id")
    is_reference = item.get("type") == "item_reference" or set(item) <= {"id", "type"}
    if not (is_reference and isinstance(identity, str)):
        return item
    prefix, _, rest = identity.partition("_")
    call = tree.calls.get(rest.partition("_")[0])
    if call is not None:
        names = [tool_call["function"]["name"] for tool_call in call.tool_calls]
        for known in items_of(call, names if f"{prefix}_" == CUSTOM_ID else ()):
            if known["id"] == identity:
                return known
    raise UnknownCall(
        400, f"input: this session has no item {identity}; send the item itself", "input"
    )


def _tools(body: Body) -> list[dict[str, Any]]:
    return [
        custom_tool(tool)
        if tool.get("type") == "custom"
        else chat_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))
        for tool in tool_objects(body)
        if is_given_tool(RESPONSES, tool)
    ]


def response(body: Body, answer: Answer) -> dict[str, Any]:
    call = answer.calls[0]
    cut_off = call.inference_metadata.finish_reason == "length"
    prompt_tokens = len(answer.prompt)
    custom = [tool.get("name") for tool in tool_objects(body) if tool.get("type") == "custom"]
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
        "output": items_of(call, custom, wants_summary(body)),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": body.get("store") is not False,
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
        finished["token_ids"] = wide_ids(call.tokens).tolist()
    return finished


def wants_summary(body: Body) -> bool:
    """Whether the client shows the summary of the thoughts. Theirs is all of them."""
    reasoning = body.get("reasoning")
    if not isinstance(reasoning, dict):
        return False
    asked = cast(dict[str, Any], reasoning)
    return bool(asked.get("summary") or asked.get("generate_summary"))


def items_of(
    call: ModelCall, custom: Sequence[Any] = (), with_summary: bool = False
) -> list[dict[str, Any]]:
    """The thoughts of an answer, its text as a message, then its calls of functions. `custom`: the
    names of the tools that take a text.
    """
    status = "incomplete" if call.inference_metadata.finish_reason == "length" else "completed"
    thoughts = thoughts_of(call.text)
    text = visible_text(call)
    items = list[dict[str, Any]]()
    if thoughts:
        items.append(
            {
                "id": REASONING_ID + call.call,
                "type": "reasoning",
                "status": status,
                "summary": [{"type": "summary_text", "text": thoughts}] if with_summary else [],
                "content": [{"type": "reasoning_text", "text": thoughts}],
                "encrypted_content": None,
            }
        )
    if text or not call.tool_calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": MESSAGE_ID + call.call,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [part],
            }
        )
    for index, tool_call in enumerate(call.tool_calls):
        function = tool_call["function"]
        is_custom = function["name"] in custom
        item: dict[str, Any] = {
            "id": f"{CUSTOM_ID if is_custom else FUNCTION_ID}{call.call}_{index}",
            "type": "custom_tool_call" if is_custom else "function_call",
            "status": status,
            "call_id": tool_call["id"],
            "name": function["name"],
        }
        if is_custom:
            item["input"] = text_of_custom_call(tool_call)
        else:
            item["arguments"] = function["arguments"]
        items.append(item)
    return items


def input_items(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of a conversation as the items of an input."""
    items = list[dict[str, Any]]()
    for number, message in enumerate(messages):
        identity = f"{MESSAGE_ID}{number}"
        if message["role"] == "tool":
            output = {"type": "function_call_output", "output": message["content"]}
            items.append({"id": identity, **output, "call_id": message.get("tool_call_id")})
            continue
        if message["content"] or not message.get("tool_calls"):
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            part = {"type": kind, "text": message["content"]}
            item = {"id": identity, "type": "message", "role": message["role"]}
            items.append({**item, "status": "completed", "content": [part]})
        for index, tool_call in enumerate(message.get("tool_calls", ())):
            function = tool_call["function"]
            item = {"id": f"{FUNCTION_ID}{number}_{index}", "type": "function_call"}
            items.append({**item, "call_id": tool_call["id"], **function})
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
        events_of = ITEM_EVENTS[item["type"]]
        stream += [{**event, "output_index": index} for event in events_of(item)]
    stream.append({"type": f"response.{finished['status']}", "response": finished})
    return [
        (event["type"], {**event, "sequence_number": number}) for number, event in enumerate(stream)
    ]


def _begun(item: dict[str, Any], **empty: Any) -> dict[str, Any]:
    return {
        "type": "response.output_item.added",
        "item": {**item, "status": "in_progress", **empty},
    }


def _reasoning_events(item: dict[str, Any]) -> list[dict[str, Any]]:
    at = {"item_id": item["id"]}
    stream = [_begun(item, summary=[], content=[])]
    for index, part in enumerate(item["summary"]):
        here = {**at, "summary_index": index}
        text = part["text"]
        stream += [
            {"type": "response.reasoning_summary_part.added", **here, "part": {**part, "text": ""}},
            {"type": "response.reasoning_summary_text.delta", **here, "delta": text},
            {"type": "response.reasoning_summary_text.done", **here, "text": text},
            {"type": "response.reasoning_summary_part.done", **here, "part": part},
        ]
    for index, part in enumerate(item["content"]):
        here = {**at, "content_index": index}
        stream += [
            {"type": "response.reasoning_text.delta", **here, "delta": part["text"]},
            {"type": "response.reasoning_text.done", **here, "text": part["text"]},
        ]
    stream.append({"type": "response.output_item.done", "item": item})
    return stream


def _message_events(item: dict[str, Any]) -> list[dict[str, Any]]:
    part = item["content"][0]
    at = {"item_id": item["id"], "content_index": 0}
    text = part["text"]
    return [
        _begun(item, content=[]),
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
        _begun(item, arguments=""),
        {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]},
        {"type": "response.function_call_arguments.done", **at, **done},
        {"type": "response.output_item.done", "item": item},
    ]


def _custom_events(item: dict[str, Any]) -> list[dict[str, Any]]:
    at = {"item_id": item["id"]}
    return [
        _begun(item, input=""),
        {"type": "response.custom_tool_call_input.delta", **at, "delta": item["input"]},
        {"type": "response.custom_tool_call_input.done", **at, "input": item["input"]},
        {"type": "response.output_item.done", "item": item},
    ]


ITEM_EVENTS = {
    "reasoning": _reasoning_events,
    "message": _message_events,
    "function_call": _function_events,
    "custom_tool_call": _custom_events,
}
DIALECT = Dialect(PATH, parse, response, events, openai_error)
