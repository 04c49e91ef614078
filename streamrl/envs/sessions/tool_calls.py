"""Reads the calls of tools in the policy's answers, and describes tools and their results.

How a call is written depends on the model, whose chat template shows it (`call_formats.py`):

- json: `<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>`, any
  number of them, as Hermes and Qwen write it.
- llama-json: `{"name": "calculator", "parameters": {"expression": "3*4"}}`, as Llama 3 writes it.
- qwen-xml: `<function=calculator>` with its `<parameter=expression>`, as Qwen3-Coder writes it.
- auto: any of these. A bare object of JSON is a call if it is the whole answer and names a tool.
- brackets: `[3*4]` and nothing else, for models whose vocabulary is a few characters. The first
  tool is called with its first argument.

What the policy writes in its thoughts (`thoughts.py`) is no call. A call stays text of the
message, because a template that writes it anew from its parts would rewrite history. All readers
take time in proportion to the length of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.config.choices import ToolSyntax
from streamrl.envs.sessions import call_formats
from streamrl.envs.sessions.call_formats import ToolCall
from streamrl.envs.sessions.messages import Message
from streamrl.envs.sessions.thoughts import spans_outside_thoughts

_READERS = {
    "auto": call_formats.read_any,
    "json": call_formats.read_json,
    "llama-json": call_formats.read_llama_json,
    "qwen-xml": call_formats.read_qwen_xml,
}


class ParsedAnswer(NamedTuple):
    """An answer of the policy: its calls in their order, and the text without them."""

    calls: list[ToolCall]
    content: str


def parse_answer(text: str, syntax: ToolSyntax, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
    """The calls in an answer and the text without them, or the text as it is if it calls nothing.
    `tools`: those that may be called, as OpenAI chat tools.
    """
    if not tools:
        return ParsedAnswer([], text)
    if syntax == "brackets":
        call = _call_in_brackets(text, tools[0]["function"])
        return ParsedAnswer([call], "") if call is not None else ParsedAnswer([], text)
    calls = list[ToolCall]()
    content = list[str]()
    position = 0
    for start, end in spans_outside_thoughts(text):
        for written in _READERS[syntax](text, start, end, tools):
            calls += written.calls
            content.append(text[position : written.start])
            position = written.end
    if not calls:
        return ParsedAnswer([], text)
    content.append(text[position:])
    return ParsedAnswer(calls, "".join(content).strip())


def parse_calls(
    text: str, syntax: ToolSyntax, tools: Sequence[Mapping[str, Any]]
) -> list[ToolCall]:
    """The calls in an answer. `tools`: those that may be called, as OpenAI chat tools."""
    return parse_answer(text, syntax, tools).calls


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


def _call_in_brackets(text: str, function: Mapping[str, Any]) -> ToolCall | None:
    """The call of this function that the text is; None if it is something else."""
    if len(text) <= 2 or text[0] != "[" or text[-1] != "]":
        return None
    argument = next(iter(function["parameters"].get("properties") or {}), "")
    return ToolCall(function["name"], {argument: text[1:-1]})
