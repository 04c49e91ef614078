"""Calls of tools as the policy writes them."""

from __future__ import annotations

from streamrl.envs.shipped.tools import parse_calls


def test_calls_in_either_syntax():
    json_call = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'
    )
    assert [
        (c.name, c.arguments) for c in parse_calls(f"I see. {json_call}{json_call}", "json", "", "")
    ] == [("calculator", {"expression": "3*4"})] * 2
    assert [
        c.error
        for c in parse_calls("<tool_call>{]</tool_call><tool_call>[1]</tool_call>", "json", "", "")
    ][1].startswith("a call is {")
    assert [c.arguments for c in parse_calls("[3*4]", "brackets", "calculator", "expression")] == [
        {"expression": "3*4"}
    ]
    assert (
        parse_calls("3*4", "brackets", "c", "e")
        == parse_calls("[]", "brackets", "c", "e")
        == parse_calls("so [3*4]", "brackets", "c", "e")
        == []
    )
