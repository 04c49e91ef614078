"""OpenAI's chat completions: a request's body to a `ChatRequest`, an answer to a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from streamrl.config.choices import template_problem
from streamrl.envs.sessions.call_tree import CallTree, visible_text
from streamrl.envs.sessions.thoughts import thoughts_of
from streamrl.extensions.gateway.fields import CHAT, is_given_tool
from streamrl.extensions.gateway.requests import (
    MAX_CHOICES,
    Answer,
    Body,
    ChatRequest,
    Dialect,
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
from streamrl.stream.records.compact import wide_ids, wide_logprobs

PATH = "/v1/chat/completions"


def parse(body: Body, tree: CallTree) -> ChatRequest:
    string(body, "model")
    limit = integer(body, "max_tokens", 0)
    return ChatRequest(
        messages=canonical_messages(
            [chat_message(message) for message in objects(body, "messages")], "messages"
        ),
        tools=tools_of(body),
        reads_tool_calls=reads_tool_calls(body),
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        n=integer(body, "n", 1, most=MAX_CHOICES),
        max_tokens=integer(body, "max_completion_tokens", limit),
        chat_template_kwargs=_template_variables(body),
    )


def reads_tool_calls(body: Body) -> bool:
    """Whether the policy may call tools. Raises RequestRejected if it would have to."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise rejection(
            "tool_choice", "the policy decides whether it calls a tool; give auto or none"
        )
    return choice != "none"


def _template_variables(body: Body) -> dict[str, Any] | msgspec.UnsetType:
    """The variables of the chat template that the request sets. Raises RequestRejected."""
    variables = body.get("chat_template_kwargs")
    if not variables:
        return msgspec.UNSET
    if not isinstance(variables, dict):
        raise rejection("chat_template_kwargs", "an object is needed")
    if problem := template_problem(variables):
        raise rejection("chat_template_kwargs", problem)
    return variables


def chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a role that chat templates know, its thoughts under one name, and each call
    as that of a function: OpenAI's `developer` is `system`.
    """
    role = message.get("role")
    result = {**message, "role": "system" if role == "developer" else role}
    content, in_content = _without_thinking(message.get("content"))
    thoughts = message.get("reasoning") or message.get("reasoning_content") or in_content
    result["content"] = content
    result["reasoning"] = thoughts if isinstance(thoughts, str) else ""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_function_call(call) for call in cast(list[Any], calls)]
    return result


def _without_thinking(content: Any) -> tuple[Any, str]:
    """The content without its parts that are thoughts, and their text."""
    if not isinstance(content, list):
        return content, ""
    rest = list[Any]()
    thoughts = ""
    for part in cast(list[Any], content):
        match part:
            case {"type": "thinking", "thinking": str(text)}:
                thoughts += text
            case _:
                rest.append(part)
    return rest, thoughts


def _function_call(call: Any) -> Any:
    match call:
        case {"type": "custom", "id": identity, "custom": {"name": name, "input": text}}:
            return custom_call(identity, name, text)
        case _:
            return call


def tools_of(body: Body) -> list[dict[str, Any]]:
    tools = list[dict[str, Any]]()
    for tool in tool_objects(body):
        if not is_given_tool(CHAT, tool):
            continue
        custom = tool.get("custom")
        function = tool.get("function")
        if tool.get("type") == "custom" and isinstance(custom, dict):
            tools.append(custom_tool(cast(dict[str, Any], custom)))
        elif isinstance(function, dict):
            name = function.get("name")
            tools.append(chat_tool(name, function.get("description"), function.get("parameters")))
        else:
            raise rejection("tools", "a tool has its name and parameters in `function`")
    return tools


def _custom_names(body: Body) -> list[Any]:
    """The names of the tools of the request that take a text."""
    return [
        tool["custom"].get("name")
        for tool in tool_objects(body)
        if tool.get("type") == "custom" and isinstance(tool.get("custom"), dict)
    ]


def response(body: Body, answer: Answer) -> dict[str, Any]:
    first = answer.calls[0]
    prompt_tokens = len(answer.prompt)
    completion: dict[str, Any] = {
        "id": f"chatcmpl-{first.call}",
        "object": "chat.completion",
        "created": int(first.time_s),
        "model": string(body, "model", "policy"),
        "choices": [_choice(body, call) for call in answer.calls],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer.sampled_tokens,
            "total_tokens": prompt_tokens + answer.sampled_tokens,
        },
    }
    if body.get("return_token_ids"):
        completion["prompt_token_ids"] = answer.prompt.tolist()
    return completion


def _choice(body: Body, call: ModelCall) -> dict[str, Any]:
    content = visible_text(call)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    thoughts = thoughts_of(call.text)
    if thoughts and body.get("include_reasoning") is not False:
        # vLLM's name for it, and that of DeepSeek, which most clients read.
        message |= {"reasoning": thoughts, "reasoning_content": thoughts}
    reason = call.inference_metadata.finish_reason
    if call.tool_calls:
        message["content"] = content or None
        custom = _custom_names(body)
        message["tool_calls"] = [_written_call(tool_call, custom) for tool_call in call.tool_calls]
        reason = "tool_calls"
    choice: dict[str, Any] = {
        "index": call.choice,
        "message": message,
        "logprobs": {"content": logprobs(call)} if body.get("logprobs") else None,
        "finish_reason": reason,
        "call": call.call,  # names the choice to /rl/set_reward
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = wide_ids(call.tokens).tolist()
        choice["weight_versions"] = weight_versions(call)
        choice["temperature"] = call.inference_metadata.temperature
    return choice


def _written_call(tool_call: dict[str, Any], custom: Sequence[Any]) -> dict[str, Any]:
    """A recorded call as the request knows the tool. `custom`: the tools that take a text."""
    name = tool_call["function"]["name"]
    if name not in custom:
        return tool_call
    made = {"name": name, "input": text_of_custom_call(tool_call)}
    return {"id": tool_call["id"], "type": "custom", "custom": made}


def weight_versions(call: ModelCall) -> list[dict[str, Any]]:
    """Which policy version sampled which tokens of an answer, as vLLM writes it."""
    return [
        {"version": str(span.version), "start": span.start, "end": span.end}
        for span in call.inference_metadata.version_spans
    ]


def logprobs(call: ModelCall) -> list[dict[str, Any]]:
    """The logprob of each sampled token, which is named by its id."""
    return [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(
            wide_ids(call.tokens).tolist(), wide_logprobs(call.logprobs).tolist(), strict=True
        )
    ]


def events(body: Body, completion: dict[str, Any]) -> list[tuple[str, Any]]:
    """The chunks of a stream: of each choice its role, its content and how it ended."""
    head = {name: completion[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    chunks = list[dict[str, Any]]()
    for choice in completion["choices"]:
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if "reasoning" in message:
            names = ("reasoning", "reasoning_content")
            deltas.append({name: message[name] for name in names})
        if message["content"]:
            deltas.append({"content": message["content"]})
        for index, tool_call in enumerate(message.get("tool_calls", [])):
            deltas.append({"tool_calls": [{"index": index, **tool_call}]})
        for number, delta in enumerate(deltas):
            part = {"index": choice["index"], "delta": delta, "finish_reason": None}
            part["logprobs"] = choice["logprobs"] if number == 1 else None
            chunks.append({**head, "choices": [part]})
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        for name in ("call", "token_ids", "weight_versions", "temperature"):
            if name in choice:
                last[name] = choice[name]
        chunks.append({**head, "choices": [last]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": completion["usage"]})
    return [("", data) for data in (*chunks, "[DONE]")]


DIALECT = Dialect(PATH, parse, response, events, openai_error)
