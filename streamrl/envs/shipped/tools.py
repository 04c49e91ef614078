"""Calls of tools in what the policy said, and what is said back. Two ways to write one: as JSON, as
models are trained to, or in brackets.

json: `<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>`, any
number of them. The call stays text of the message, for a template that writes it anew from its
parts would rewrite history. brackets: `[3*4]`, all that was said, for models of a few characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from streamrl.envs.api import Message

Syntax = Literal["json", "brackets"]
JSON = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Call(NamedTuple):
    """A call as it was written; `error` says why it cannot be made."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


def calls(text: str, syntax: Syntax, name: str, argument: str) -> list[Call]:
    """The calls in what was said. In brackets there is one tool, `name`, with one `argument`."""
    if syntax == "brackets":
        return (
            [Call(name, {argument: text[1:-1]})]
            if len(text) > 2 and text[0] == "[" and text[-1] == "]"
            else []
        )
    return [_read(body) for body in JSON.findall(text)]


def result(text: str, call: int) -> Message:
    """What the policy is told of its call number `call`."""
    return {"role": "tool", "content": text, "tool_call_id": f"call-{call}"}


def described(name: str, what: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    """A tool as an OpenAI function; its `arguments` are strings, by name with what they are."""
    properties = {
        argument: {"type": "string", "description": meaning}
        for argument, meaning in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": what, "parameters": parameters},
    }


def _read(body: str) -> Call:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"not JSON: {error}")
    match data:
        case {"name": str(name), "arguments": dict(arguments)}:
            return Call(name, arguments)
        case _:
            return Call("", {}, 'a call is {"name": ..., "arguments": {...}}')
