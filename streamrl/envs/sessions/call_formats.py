"""The formats in which families of models write calls of tools, each with its reader.

The formats are those of the models' chat templates, as vLLM's tool parsers `hermes`, `llama3_json`
and `qwen3_coder` read them. A reader looks at each character a bounded number of times, because the
policy may write anything: a tag without its end 16,000 times is an answer, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, cast

Tools = Sequence[Mapping[str, Any]]
TemplateSyntax = Literal["json", "llama-json", "qwen-xml"]

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
FUNCTION = "<function="
PYTHON_TAG = "<|python_tag|>"
# What chat templates have in them that write calls in a format which is not read here.
UNREAD_FORMATS = {
    "[TOOL_CALLS]": "Mistral",
    "<arg_key>": "GLM",
    "<|tool_call|>": "Granite and Phi",
    "<|action_start|>": "InternLM",
    "<function_calls>": "OLMo",
    "<start_function_call>": "FunctionGemma",
    "<|tool_calls_section_begin|>": "Kimi",
    "<minimax:tool_call>": "MiniMax",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>": "DeepSeek",
    "<|channel|>": "gpt-oss",
}
# In a name no bracket is allowed, so that a tag without its end is given up at the next tag.
_XML_TAG = re.compile(
    r"(?P<tool></?tool_call>)"
    r"|<function=(?P<function>[^<>\n]{1,256})>"
    r"|<parameter=(?P<parameter>[^<>\n]{1,256})>"
    r"|(?P<parameter_end></parameter>)"
    r"|(?P<function_end></function>)"
)
_CONSTANTS = {"True": True, "False": False, "None": None}


class ToolCall(NamedTuple):
    """A call as it was written; `error` states why it cannot be made."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


class WrittenCalls(NamedTuple):
    """Calls, and the part of the text in which they are written."""

    start: int
    end: int
    calls: list[ToolCall]


def syntax_of_template(template: str) -> TemplateSyntax | None:
    """The format in which a chat template writes calls; None if it knows no tools. Raises
    ValueError, which names the format, for one that has no reader.
    """
    for mark, family in UNREAD_FORMATS.items():
        if mark in template:
            raise ValueError(f"it writes calls of tools with {mark}, as models of {family} do")
    if FUNCTION in template:
        return "qwen-xml"
    if OPENING in template:
        return "json"
    if '"parameters": ' in template and '{"name": ' in template:
        return "llama-json"
    if re.search(r"\btools\b", template):
        raise ValueError("it shows tools to the model, and calls in a format that is not known")
    return None


def read_any(text: str, start: int, end: int, tools: Tools) -> Iterator[WrittenCalls]:
    """Calls in any of the formats between two positions of the text. A bare object of JSON counts
    if it is all that is there, and names one of the tools.
    """
    opening = text.find(OPENING, start, end)
    function = text.find(FUNCTION, start, end)
    is_in_tag = opening >= 0 and not text[opening + len(OPENING) : function].strip()
    if function >= 0 and (opening < 0 or is_in_tag):
        yield from read_qwen_xml(text, start, end, tools)
    elif opening >= 0:
        yield from read_json(text, start, end, tools)
    elif text[start:end].strip().removeprefix(PYTHON_TAG).lstrip().startswith("{"):
        names = {tool["function"]["name"] for tool in tools}
        for written in read_llama_json(text, start, end, tools):
            rest = text[start : written.start] + text[written.end : end]
            if not rest.strip() and names.issuperset(call.name for call in written.calls):
                yield written


def read_json(text: str, start: int, end: int, tools: Tools) -> Iterator[WrittenCalls]:
    """Calls between `<tool_call>` and `</tool_call>`: an object of JSON, or a list of them. The
    last one need not be closed.
    """
    while (opening := text.find(OPENING, start, end)) >= 0:
        body = opening + len(OPENING)
        closing = text.find(CLOSING, body, end)
        stop = closing if closing >= 0 else end
        start = closing + len(CLOSING) if closing >= 0 else end
        yield WrittenCalls(opening, start, _calls_of_json(text[body:stop]))


def read_llama_json(text: str, start: int, end: int, tools: Tools) -> Iterator[WrittenCalls]:
    """Calls as objects of JSON with a name and `parameters`, from the first bracket on, with `;` or
    space between them. If one of them is something else, there is no call.
    """
    first = text.find("{", start, end)
    if first < 0:
        return
    calls = list[ToolCall]()
    position = first
    part = text[:end]
    while position < end and text[position] == "{":
        try:
            value, position = _DECODER.raw_decode(part, position)
        except (ValueError, RecursionError):
            return
        call = _call_of_value(value)
        if call.error or not ("arguments" in value or "parameters" in value):
            return
        calls.append(call)
        last = position
        while position < end and (text[position].isspace() or text[position] == ";"):
            position += 1
        if position == end or text[position] != "{":
            position = last
            break
    tag = text.rfind(PYTHON_TAG, start, first)
    yield WrittenCalls(tag if tag >= 0 else first, position, calls)


def read_qwen_xml(text: str, start: int, end: int, tools: Tools) -> Iterator[WrittenCalls]:
    """Calls as `<function=NAME>` with a `<parameter=NAME>` for each argument, in `<tool_call>` or
    alone. The tool's schema tells which arguments are text.
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    types = dict[tuple[str, str], set[str]]()
    written = list[WrittenCalls]()
    first = -1  # where the call begins
    name = ""  # of the function that is open
    arguments = dict[str, Any]()
    parameter = ""
    value_start = -1  # of the argument that is open
    for tag in _XML_TAG.finditer(text, start, end):
        kind = cast(str, tag.lastgroup)
        if value_start >= 0:
            if kind in ("tool", "function"):  # it is text of the argument
                continue
            key = (name, parameter)
            if key not in types:
                properties = schemas.get(name, {}).get("properties") or {}
                types[key] = _types_of(properties.get(parameter))
            value = text[value_start : tag.start()].removeprefix("\n").removesuffix("\n")
            arguments[parameter] = _typed(value, types[key])
            value_start = -1
        match kind:
            case "tool" if tag[0] == OPENING and not name:
                first = tag.start()
            case "tool" if written and not name:
                written[-1] = written[-1]._replace(end=tag.end())
                first = -1
            case "function" if not name:
                first = first if first >= 0 else tag.start()
                name = tag["function"].strip()
                arguments = {}
            case "parameter" if name:
                parameter = tag["parameter"].strip()
                value_start = tag.end()
            case "function_end" if name:
                written.append(WrittenCalls(first, tag.end(), [_checked(name, arguments)]))
                first = -1
                name = ""
            case _:
                pass
    yield from written
    if first >= 0:
        yield WrittenCalls(first, end, [ToolCall("", {}, "the call has no </function>")])


# ---- parts of a call -----------------------------------------------------------------------------


def _calls_of_json(body: str) -> list[ToolCall]:
    """The calls that the text between two tags has, at least one."""
    try:
        value = _DECODER.decode(body.strip())
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, f"not JSON: {error}")]
    values = cast(list[Any], value) if isinstance(value, list) and value else [value]
    return [_call_of_value(each) for each in values]


def _call_of_value(value: Any) -> ToolCall:
    """The call that an object of JSON is."""
    match value:
        case {"name": str(name)} if name:
            arguments = value.get("arguments", value.get("parameters"))
        case _:
            return ToolCall("", {}, 'a call is {"name": ..., "arguments": {...}}')
    if isinstance(arguments, str):  # some models write the object as a text of JSON
        try:
            arguments = _DECODER.decode(arguments.strip() or "{}")
        except (ValueError, RecursionError) as error:
            return ToolCall(name, {}, f"the arguments of {name!r} are not JSON: {error}")
    if not isinstance(arguments, dict | None):
        return ToolCall(name, {}, f"the arguments of {name!r} are no object")
    return _checked(name, cast(dict[str, Any], arguments or {}))


def _checked(name: str, arguments: dict[str, Any]) -> ToolCall:
    """The call, if a client can be sent it: no half of a surrogate pair, and no number that JSON
    does not have.
    """
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"a call that no JSON can have: {type(error).__name__}")
    return ToolCall(name, arguments)


def _typed(value: str, types: set[str]) -> Any:
    """The value of an argument that was written as text, by the types that its schema allows. It
    stays text where that is one of them, or where it is no JSON.
    """
    text = value.strip()
    is_null = "null" in types and text in ("null", "None")
    if not types or ("string" in types and not is_null):
        return value
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return value


def _types_of(schema: Any) -> set[str]:
    """The types of JSON that a schema allows; empty if it does not tell."""
    if not isinstance(schema, dict):
        return set()
    given = cast(dict[str, Any], schema)
    types = given.get("type")
    result = {types} if isinstance(types, str) else set[str]()
    if isinstance(types, list):
        result |= {kind for kind in cast(list[Any], types) if isinstance(kind, str)}
    for options in (given.get("anyOf"), given.get("oneOf")):
        for option in cast(list[Any], options) if isinstance(options, list) else ():
            result |= _types_of(option)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
