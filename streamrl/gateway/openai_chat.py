"""OpenAI's chat completions: a request's body to a `ChatRequest`, an answer to a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.config.choices import template_problem
from streamrl.gateway.requests import (
    MAX_CHOICES,
    Answer,
    Body,
    ChatRequest,
    Dialect,
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

NEUTRAL = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "top_logprobs": (0,),
    "web_search_options": (),
}


def parse(body: Body, tree: CallTree) -> ChatRequest:
    refuse_fields(body, NEUTRAL)
    string(body, "model")
    limit = integer(body, "max_tokens", 0)
    return ChatRequest(
        messages=canonical_messages(
            [renamed_role(message) for message in objects(body, "messages")], "messages"
        ),
        tools=tools_of(body),
        reads_tool_calls=body.get("tool_choice") != "none",
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        n=integer(body, "n", 1, most=MAX_CHOICES),
        max_tokens=integer(body, "max_completion_tokens", limit),
        chat_template_kwargs=_template_variables(body),
    )


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


def renamed_role(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a role that chat templates know: OpenAI's `developer` is `system`."""
    role = message.get("role")
    return {**message, "role": "system" if role == "developer" else role}


def tools_of(body: Body) -> list[dict[str, Any]]:
    tools = list[dict[str, Any]]()
    for tool in tool_objects(body):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise rejection("tools", "each is of type function")
        name = function.get("name")
        tools.append(chat_tool(name, function.get("description"), function.get("parameters")))
    return tools


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
    reason = call.inference_metadata.finish_reason
    if call.tool_calls:
        message["content"] = content or None
        message["tool_calls"] = call.tool_calls
        reason = "tool_calls"
    choice: dict[str, Any] = {
        "index": call.choice,
        "message": message,
        "logprobs": {"content": logprobs(call)} if body.get("logprobs") else None,
        "finish_reason": reason,
        "call": call.call,  # names the choice to /rl/set_reward
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = call.tokens.tolist()
        choice["weight_versions"] = weight_versions(call)
        choice["temperature"] = call.inference_metadata.temperature
    return choice


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
        for token, value in zip(call.tokens.tolist(), call.logprobs.tolist(), strict=True)
    ]


def events(body: Body, completion: dict[str, Any]) -> list[tuple[str, Any]]:
    """The chunks of a stream: of each choice its role, its content and how it ended."""
    head = {name: completion[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    chunks = list[dict[str, Any]]()
    for choice in completion["choices"]:
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
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


DIALECT = Dialect(parse, response, events, openai_error)
