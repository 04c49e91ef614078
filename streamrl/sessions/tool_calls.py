"""Reads the calls of tools in the policy's answers, and describes tools and their results.

A call is written in one of two ways:

- json: `<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>`, any
  number of them, as models are trained to write it. The call stays text of the message, because a
  template that writes it anew from its parts would rewrite history.
- brackets: `[3*4]` and nothing else, for models whose vocabulary is a few characters. The first
  tool is called with its first argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from streamrl.sessions.messages import Message

CallSyntax = Literal["json", "brackets"]
SYNTAXES: tuple[CallSyntax, ...] = get_args(CallSyntax)
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    """A call as it was written; `error` says why it cannot be made."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


def parse_calls(
    text: str, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]
) -> list[ToolCall]:
    """The calls in a text. `tools`: those that may be called, as OpenAI chat tools."""
    if not tools:
        return []
    if syntax == "json":
        return [_parse_call(body) for body in TOOL_CALL.findall(text)]
    if len(text) > 2 and text[0] == "[" and text[-1] == "]":
        function = tools[0]["function"]
        argument = next(iter(function["parameters"].get("properties") or {}), "")
        return [ToolCall(function["name"], {argument: text[1:-1]})]
    return []


def tool_message(text: str, call: int) -> Message:
    """The message that tells the policy the result of its call number `call`."""
    return {"role": "tool", "content": text, "tool_call_id": f"call-{call}"}


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """A tool as an OpenAI chat tool. `parameters`: the JSON schema of an object."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def _parse_call(body: str) -> ToolCall:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"not JSON: {error}")
    match data:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
        case _:
            return ToolCall("", {}, 'a call is {"name": ..., "arguments": {...}}')
