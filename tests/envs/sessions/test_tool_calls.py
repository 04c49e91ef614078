"""Calls of tools as the policy writes them, and its thoughts about them."""

from __future__ import annotations

import pytest

from streamrl.config.choices import TOOL_SYNTAXES, ToolSyntax
from streamrl.envs.sessions.tool_calls import (
    function_tool,
    parse_answer,
    parse_calls,
    spans_outside_thoughts,
)

PROPERTIES = {"expression": {"type": "string"}, "digits": {"type": "integer"}}
TOOL = function_tool("calculator", None, {"type": "object", "properties": PROPERTIES})
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "calculator", "arguments": {"expression": "5+6"}}</tool_call>'


def expressions(text: str, syntax: ToolSyntax = "auto") -> list[object]:
    return [call.arguments.get("expression") for call in parse_calls(text, syntax, [TOOL])]


def test_calls_between_tags():
    assert [(c.name, c.arguments) for c in parse_calls(f"I see. {CALL}{CALL}", "json", [TOOL])] == [
        ("calculator", {"expression": "3*4"})
    ] * 2


def test_calls_in_brackets_are_all_of_the_answer():
    assert expressions("[3*4]", "brackets") == ["3*4"]
    assert expressions("[7]", "brackets") == ["7"]
    for text in ("3*4", "[]", "so [3*4]"):
        assert expressions(text, "brackets") == []


@pytest.mark.parametrize("syntax", TOOL_SYNTAXES)
def test_without_tools_nothing_is_a_call(syntax: ToolSyntax):
    for text in (CALL, "[3*4]", '{"name": "calculator", "parameters": {}}'):
        assert parse_answer(text, syntax, []) == ([], text)


def test_the_text_without_calls():
    assert parse_answer(f" I see. {CALL} And: {OTHER}\n", "json", [TOOL]).content == (
        "I see.  And:"
    )
    assert parse_answer("  no call ", "json", [TOOL]).content == "  no call "
    assert parse_answer("[3*4]", "brackets", [TOOL]).content == ""


@pytest.mark.parametrize("syntax", ["auto", "json"])
@pytest.mark.parametrize(
    ("answer", "called"),
    [
        (f"<think>I could {CALL} but need not.</think>The answer is 12.", []),
        (f"<think>{CALL}? No.</think>{OTHER}", ["5+6"]),
        # the template has opened the thought
        (f"I could {CALL}.</think>{OTHER}", ["5+6"]),
        # a thought that was cut off
        (f"<think>I could {CALL}", []),
        (f"{CALL}<think>and now {OTHER}", ["3*4"]),
        # thoughts between two calls
        (f"<think>a</think>{CALL}<think>{OTHER}</think>{OTHER}", ["3*4", "5+6"]),
        (f"<think>a<think>b</think>{CALL}</think>{OTHER}", ["5+6"]),
        (f"{CALL}", ["3*4"]),
    ],
)
def test_calls_inside_thoughts_are_no_calls(answer: str, called: list[str], syntax: ToolSyntax):
    assert expressions(answer, syntax) == called


def test_thoughts_stay_in_the_text_beside_calls():
    answer = parse_answer(f"<think>say {CALL}?</think>\n{OTHER}", "auto", [TOOL])
    assert answer.content == f"<think>say {CALL}?</think>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", [""]),
        ("all", ["all"]),
        ("<think>a</think>b", ["", "b"]),
        ("a</think>b", ["b"]),
        ("<think>a", [""]),
        ("a<think>b</think>c<think>d</think>e", ["a", "c", "e"]),
        ("</think></think>a", ["a"]),
    ],
)
def test_parts_outside_thoughts(text: str, parts: list[str]):
    assert [text[start:end] for start, end in spans_outside_thoughts(text)] == parts


def test_a_tool_has_the_form_of_a_chat_tool():
    schema = {"type": "object", "properties": {}}
    assert function_tool("now", "Tells the time.", schema) == {
        "type": "function",
        "function": {"name": "now", "description": "Tells the time.", "parameters": schema},
    }
    assert function_tool("now", None, schema)["function"] == {"name": "now", "parameters": schema}
