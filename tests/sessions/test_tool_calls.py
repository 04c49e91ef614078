"""Calls of tools as the policy writes them."""

from __future__ import annotations

from streamrl.sessions.tool_calls import function_tool, parse_calls

PROPERTIES = {"expression": {"type": "string"}, "digits": {"type": "integer"}}
TOOL = function_tool("calculator", None, {"type": "object", "properties": PROPERTIES})


def test_calls_in_either_syntax():
    json_call = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'
    )
    assert [
        (c.name, c.arguments) for c in parse_calls(f"I see. {json_call}{json_call}", "json", [TOOL])
    ] == [("calculator", {"expression": "3*4"})] * 2
    assert [
        c.error
        for c in parse_calls("<tool_call>{]</tool_call><tool_call>[1]</tool_call>", "json", [TOOL])
    ][1].startswith("a call is {")
    assert [c.arguments for c in parse_calls("[3*4]", "brackets", [TOOL])] == [
        {"expression": "3*4"}
    ]
    assert (
        parse_calls("3*4", "brackets", [TOOL])
        == parse_calls("[]", "brackets", [TOOL])
        == parse_calls("so [3*4]", "brackets", [TOOL])
        == parse_calls("[3*4]", "brackets", [])
        == parse_calls(json_call, "json", [])
        == []
    )


def test_a_tool_may_have_no_description():
    assert TOOL["type"] == "function" and list(TOOL["function"]) == ["name", "parameters"]
    described = function_tool("calculator", "Calculates", {})["function"]
    assert described == {"name": "calculator", "description": "Calculates", "parameters": {}}
