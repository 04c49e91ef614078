"""The formats of tool calls, as the families' chat templates write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamrl.config.choices import ToolSyntax
from streamrl.envs.sessions.call_formats import ToolCall, syntax_of_template
from streamrl.envs.sessions.tool_calls import function_tool, parse_answer, parse_calls

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "where": {"type": ["object", "array"]},
    "any": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES}
TOOLS = [function_tool("weather", None, SCHEMA), function_tool("now", None, {})]
PARIS = ToolCall("weather", {"city": "Paris"})


def read(text: str, syntax: ToolSyntax = "auto") -> list[ToolCall]:
    return parse_calls(text, syntax, TOOLS)


def in_tags(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def in_xml(**arguments: str) -> str:
    lines = [f"<parameter={name}>\n{value}\n</parameter>" for name, value in arguments.items()]
    return in_tags("\n".join(["<function=weather>", *lines, "</function>"]))


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('{"name": "weather", "arguments": {"city": "Paris"}}', [PARIS]),
        ('{"arguments": {"city": "Paris"}, "name": "weather"}', [PARIS]),
        # arguments as a text of JSON
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
        # no arguments
        ('{"name": "now"}', [ToolCall("now", {})]),
        ('{"name": "now", "arguments": {}}', [ToolCall("now", {})]),
        ('{"name": "now", "arguments": null}', [ToolCall("now", {})]),
        ('{"name": "now", "arguments": ""}', [ToolCall("now", {})]),
        # a list of calls, as SmolLM2 writes them
        (
            '[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now"}]',
            [PARIS, ToolCall("now", {})],
        ),
    ],
)
def test_json_between_tags(body: str, calls: list[ToolCall]):
    assert read(in_tags(body)) == calls
    assert read(in_tags(body), "json") == calls


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{]", "not JSON"),
        ("", "not JSON"),
        ("[1]", "a call is {"),
        ("[]", "a call is {"),
        ('{"arguments": {}}', "a call is {"),
        ('{"name": 3, "arguments": {}}', "a call is {"),
        ('{"name": "", "arguments": {}}', "a call is {"),
        ('{"name": "now", "arguments": [1]}', "the arguments of 'now' are no object"),
        ('{"name": "now", "arguments": "soon"}', "the arguments of 'now' are not JSON"),
        ('{"name": "now", "arguments": {"at": NaN}}', "not JSON: NaN is no number"),
        ('{"name": "now", "arguments": {"at": 1e999}}', "a call that no JSON can have"),
        ('{"name": "\\ud800", "arguments": {}}', "a call that no JSON can have"),
        ('{"name": "now", "arguments": {"at": "\\ud800"}}', "a call that no JSON can have"),
        ('{"name": "now", "arguments": ' + "9" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_call_between_tags_states_why(body: str, error: str):
    (call,) = read(in_tags(body))
    assert call.error.startswith(error)


def test_a_call_after_a_sentence():
    assert read("I will look.\n" + in_xml(city="Paris")) == [PARIS]
    assert read("I will look.\n" + in_tags('{"name": "now"}')) == [ToolCall("now", {})]


def test_the_last_call_between_tags_need_not_be_closed():
    body = '{"name": "weather", "arguments": {"city": "Paris"}}'
    assert read(f"<tool_call>\n{body}\n") == [PARIS]
    assert read(f"{in_tags(body)}<tool_call>{body}") == [PARIS, PARIS]
    assert read("<tool_call>" + body[:-3])[0].error.startswith("not JSON")


@pytest.mark.parametrize("syntax", ["auto", "llama-json"])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ('\n{"name": "weather", "arguments": {"city": "Paris"}}\n', [PARIS]),
        ('<think>hm</think>{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ('{"name": "now", "parameters": {}}', [ToolCall("now", {})]),
        (
            '{"name": "now", "parameters": {}}; '
            '{"name": "weather", "parameters": {"city": "Paris"}}',
            [ToolCall("now", {}), PARIS],
        ),
        ('{"city": "Paris"}', []),
        ('{"name": "now"}', []),  # it may be any object that has a name
        ('{"name": "weather", "parameters": {"city": "Par', []),
        ("{", []),
        ("It is 12 degrees.", []),
    ],
)
def test_json_of_llama(text: str, calls: list[ToolCall], syntax: ToolSyntax):
    assert read(text, syntax) == calls


def test_json_of_llama_after_some_words_is_a_call_only_where_the_family_is_known():
    text = 'I look. {"name": "weather", "parameters": {"city": "Paris"}}'
    assert read(text, "llama-json") == [PARIS]
    assert parse_answer(text, "llama-json", TOOLS).content == "I look."
    assert read(text, "auto") == []


def test_an_answer_of_json_that_names_no_tool_is_an_answer():
    text = '{"name": "Alice", "parameters": {"age": 7}}'
    assert read(text, "auto") == []
    assert read(text, "llama-json") == [ToolCall("Alice", {"age": 7})]


def test_json_without_tags_is_no_call_of_families_that_have_tags():
    assert read('{"name": "weather", "arguments": {"city": "Paris"}}', "json") == []
    assert read('{"name": "weather", "arguments": {"city": "Paris"}}', "qwen-xml") == []


@pytest.mark.parametrize("syntax", ["auto", "qwen-xml"])
def test_xml_of_qwen(syntax: ToolSyntax):
    assert read(in_xml(city="Paris"), syntax) == [PARIS]
    assert read(f"I look.\n{in_xml(city='Paris')}\n{in_xml(city='Paris')}", syntax) == [PARIS] * 2
    assert read(in_tags("<function=now>\n</function>"), syntax) == [ToolCall("now", {})]
    # the tag before it is often left out
    bare = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    assert read(bare, syntax) == [PARIS]
    assert parse_answer(f"So: {bare}", syntax, TOOLS).content == "So:"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", "two\nlines <b>", "two\nlines <b>"),
        ("city", "a <tool_call> in it", "a <tool_call> in it"),
        ("city", "null", "null"),
        ("days", "12", 12),
        ("days", " 12 ", 12),
        ("days", "a few", "a few"),
        ("exact", "true", True),
        ("exact", "False", False),
        ("units", "null", None),
        ("units", "12", "12"),
        ("where", '{"x": [1, 2]}', {"x": [1, 2]}),
        ("any", "12", "12"),
        ("unknown", "12", "12"),
    ],
)
def test_arguments_in_xml_have_the_types_of_the_schema(name: str, text: str, value: Any):
    (call,) = read(in_xml(**{name: text}))
    assert call == ToolCall("weather", {name: value})


def test_a_call_in_xml_that_was_cut_off_states_why():
    for text in ("<tool_call>\n<function=weather>\n<parameter=city>\nPar", "<function=weather>"):
        (call,) = read(text)
        assert call.error == "the call has no </function>"


@pytest.mark.parametrize("syntax", ["auto", "json", "llama-json", "qwen-xml"])
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call></tool_call>",
        "<function=",
        "<function=f>",
        "<parameter=",
        "<function=f><parameter=a>",
        "<think>",
        "</think>",
        "<think></think>",
        "{",
        '{"name": ',
        '{"a": 1};',
        "<|python_tag|>",
        "[",
        '"',
        "\\",
    ],
)
def test_no_answer_is_looked_at_more_than_a_few_times(piece: str, syntax: ToolSyntax):
    """An answer of a million characters takes hours where each tag looks for its end."""
    text = piece * (1_000_000 // len(piece))
    calls = parse_calls(text, syntax, TOOLS)
    assert all(call.error for call in calls)


LLAMA = """{{- 'Respond in the format {"name": function name, "parameters": dictionary}.' }}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{ tools }}"""


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{%- if tools %}<tool_call>{{ tool_call.arguments | tojson }}</tool_call>", "json"),
        ("{%- if tools %}<tool_call>\n<function=example>\n<parameter=x>", "qwen-xml"),
        (LLAMA, "llama-json"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_the_chat_template_tells_the_format(template: str, syntax: str | None):
    assert syntax_of_template(template) == syntax


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "Mistral"),
        ("{% if tools %}<tool_call>name\n<arg_key>k</arg_key>", "GLM"),
        ("{% if tools %}<\uff5ctool\u2581calls\u2581begin\uff5c>", "DeepSeek"),
        ("{% if tools %}{{ tools | tojson }}", "a format that is not known"),
    ],
)
def test_a_format_that_is_not_read_is_named(template: str, named: str):
    with pytest.raises(ValueError, match=named):
        syntax_of_template(template)


def test_calls_are_read_as_their_clients_read_them():
    (call,) = read(in_tags('{"name": "weather", "arguments": {"city": "Zürich \\u00e9"}}'))
    assert json.loads(json.dumps(call.arguments)) == {"city": "Zürich é"}


def test_json_at_the_start_of_a_text_may_hold_what_looks_like_xml():
    text = '<tool_call>{"name": "weather", "arguments": {"city": "<function=now>"}}</tool_call>'
    assert read(text) == [ToolCall("weather", {"city": "<function=now>"})]
