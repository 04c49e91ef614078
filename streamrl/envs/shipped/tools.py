"""Reads calls of tools in what the policy said, and writes what is said back.

A call is written in one of two ways:

- json: `<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>`, any
  number of them, as models are trained to write it. The call stays text of the message, because a
  template that writes it anew from its parts would rewrite history.
- brackets: `[3*4]` and nothing else, for models whose vocabulary is a few characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from streamrl.envs.api import Message

CallSyntax = Literal["json", "brackets"]
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    """A call as it was written; `error` says why it cannot be made."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


def parse_calls(text: str, syntax: CallSyntax, name: str, argument: str) -> list[ToolCall]:
    """The calls in a text. In brackets there is one tool, `name`, with one `argument`."""
    if syntax == "json":
        return [_parse_call(body) for body in TOOL_CALL.findall(text)]
    if len(text) > 2 and text[0] == "[" and text[-1] == "]":
        return [ToolCall(name, {argument: text[1:-1]})]
    return []


def tool_message(text: str, call: int) -> Message:
    """The message that tells the policy the result of its call number `call`."""
    return {"role": "tool", "content": text, "tool_call_id": f"call-{call}"}


def function_tool(name: str, description: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    """A tool as an OpenAI function. Its arguments are strings; `arguments` has what each means."""
    properties = {
        argument: {"type": "string", "description": meaning}
        for argument, meaning in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


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
