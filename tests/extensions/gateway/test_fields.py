"""The list of fields, against the types of the installed packages of OpenAI and Anthropic, and what
becomes of single fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import pytest
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import input_token_count_params, response_create_params

from streamrl.extensions.gateway.fields import (
    CHAT,
    FIELDS,
    MESSAGES,
    RESPONSES,
    TOKEN_IDS,
    Rule,
    check_fields,
    left_out_header,
)
from streamrl.extensions.gateway.requests import RequestRejected
from tests.extensions.gateway.conftest import BODY, INPUT, Shared, post

ASKED = [{"role": "user", "content": "q"}]
BEGUN = {"role": "assistant", "content": "The answer is"}
SCHEMA = {"type": "object"}
REQUEST_TYPES = [
    (CHAT, completion_create_params.CompletionCreateParamsNonStreaming),
    (CHAT, completion_create_params.CompletionCreateParamsStreaming),
    (RESPONSES, response_create_params.ResponseCreateParamsNonStreaming),
    (RESPONSES, response_create_params.ResponseCreateParamsStreaming),
    (RESPONSES, input_token_count_params.InputTokenCountParams),
    (MESSAGES, message_create_params.MessageCreateParamsNonStreaming),
    (MESSAGES, message_create_params.MessageCreateParamsStreaming),
    (MESSAGES, beta_message_create_params.MessageCreateParamsStreaming),
    (MESSAGES, message_count_tokens_params.MessageCountTokensParams),
]


def members(hint: Any) -> Iterator[Any]:
    """What a value of the type may be made of: the types in unions, lists and their like, and the
    values of literals.
    """
    if isinstance(hint, typing_extensions.TypeAliasType):
        hint = hint.__value__
    if typing_extensions.get_origin(hint) is Literal:
        yield from typing_extensions.get_args(hint)
        return
    inner = typing_extensions.get_args(hint)
    if not inner:
        yield hint
    for each in inner:
        if not isinstance(each, str):
            yield from members(each)


def missing(fields: Mapping[str, Rule], request: Any, path: str = "") -> Iterator[str]:
    """The fields of a request's type that the list does not have."""
    for name, hint in typing_extensions.get_type_hints(request).items():
        at = f"{path}.{name}" if path else name
        rule = fields.get(name)
        if rule is None:
            yield at
            continue
        for member in members(hint):
            if typing_extensions.is_typeddict(member):
                yield from missing_inside(rule, member, at)
            elif isinstance(member, str) and rule.kinds is not None and member not in rule.kinds:
                yield f"{at}: {member}"


def missing_inside(rule: Rule, item: Any, at: str) -> Iterator[str]:
    rules = [rule]
    if rule.kinds is not None:
        hint = typing_extensions.get_type_hints(item).get("type", Literal[""])
        kinds = [kind for kind in members(hint) if isinstance(kind, str)]
        yield from (f"{at}: {kind}" for kind in kinds if kind not in rule.kinds)
        rules = [rule.kinds[kind] for kind in kinds if kind in rule.kinds]
    for one in rules:
        if one.fields is not None:
            yield from missing(one.fields, item, at)


@pytest.mark.parametrize(("fields", "request_type"), REQUEST_TYPES)
def test_every_field_of_the_installed_packages_is_in_the_list(
    fields: Mapping[str, Rule], request_type: Any
):
    found = sorted(set(missing(fields, request_type)))
    assert found == [], "decide in streamrl/extensions/gateway/fields.py what becomes of these"


class NewPart(typing_extensions.TypedDict, total=False):
    type: Literal["hologram"]


class NewOptions(typing_extensions.TypedDict, total=False):
    include_smells: bool


class NewRequest(typing_extensions.TypedDict, total=False):
    model: str
    wishes: int
    stream_options: NewOptions | None
    tools: list[NewPart]


def test_a_field_that_a_new_release_adds_is_found():
    assert list(missing(CHAT, NewRequest)) == [
        "wishes",
        "stream_options.include_smells",
        "tools: hologram",
    ]


def rules_of(fields: Mapping[str, Rule]) -> Iterator[Rule]:
    for rule in fields.values():
        yield rule
        yield from rules_of(rule.fields or {})
        yield from rules_of(rule.kinds or {})


@pytest.mark.parametrize("path", FIELDS)
def test_whatever_is_not_kept_has_a_reason(path: str):
    for rule in rules_of(FIELDS[path]):
        assert bool(rule.reason) or rule.outcome in ("honoured", "harmless")


CHANGES: list[tuple[Mapping[str, Rule], str, dict[str, Any]]] = [
    # what changes the distribution
    *(
        (fields, name, {name: value})
        for fields in (CHAT, RESPONSES, MESSAGES)
        for name, value in {
            "logit_bias": {"5": 3},
            "presence_penalty": 0.5,
            "frequency_penalty": -1,
            "repetition_penalty": 1.5,
            "min_p": 0.2,
            "stop": ["x"],
            "stop_token_ids": [5],
            "min_tokens": 50,
            "bad_words": ["x"],
            "allowed_token_ids": [7],
            "ignore_eos": True,
            "best_of": 4,
            "use_beam_search": True,
            "structured_outputs": {"json": SCHEMA},
            "guided_json": SCHEMA,
            "guided_choice": ["yes", "no"],
            "guided_regex": "a+",
            "guided_grammar": "x",
            "truncate_prompt_tokens": 2,
            "chat_template": "{{x}}",
            "documents": [{"text": "x"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "prompt_logprobs": 1,
            "echo": True,
            "wishes": 3,
        }.items()
    ),
    (CHAT, "response_format", {"response_format": {"type": "json_object"}}),
    (CHAT, "top_logprobs", {"top_logprobs": 3}),
    (CHAT, "functions", {"functions": [{"name": "f"}]}),
    (CHAT, "messages", {"messages": [*ASKED, {**BEGUN, "prefix": True}]}),
    (CHAT, "messages", {"messages": [{**BEGUN, "function_call": {"name": "f"}}]}),
    (CHAT, "messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, "stream_options.wishes", {"stream_options": {"wishes": True}}),
    (RESPONSES, "n", {"n": 2}),
    (RESPONSES, "text.format", {"text": {"format": {"type": "json_schema"}}}),
    (RESPONSES, "include", {"include": ["message.output_text.logprobs"]}),
    (RESPONSES, "truncation", {"truncation": "auto"}),
    (RESPONSES, "max_tool_calls", {"max_tool_calls": 1}),
    (RESPONSES, "context_management", {"context_management": [{"type": "compaction"}]}),
    (RESPONSES, "chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    (RESPONSES, "input", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
    (RESPONSES, "input", {"input": [{"type": "hologram"}]}),
    (MESSAGES, "output_config.format", {"output_config": {"format": {"type": "json_schema"}}}),
    (MESSAGES, "output_config.task_budget", {"output_config": {"task_budget": {"total": 9}}}),
    (
        MESSAGES,
        "context_management.edits",
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    ),
    (MESSAGES, "chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    (MESSAGES, "thinking.wishes", {"thinking": {"type": "adaptive", "wishes": 3}}),
    (MESSAGES, "mcp_servers", {"mcp_servers": [{"name": "m", "type": "url", "url": "x"}]}),
    (MESSAGES, "messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
    (TOKEN_IDS, "stream", {"stream": True}),
    (TOKEN_IDS, "sampling_params.stop", {"sampling_params": {"stop": ["x"]}}),
    (TOKEN_IDS, "sampling_params.logprobs", {"sampling_params": {"logprobs": 5}}),
    (TOKEN_IDS, "sampling_params.wishes", {"sampling_params": {"wishes": 5}}),
]


@pytest.mark.parametrize(("fields", "name", "body"), CHANGES)
def test_what_changes_the_distribution_the_prompt_or_the_answer_is_refused_by_its_name(
    fields: Mapping[str, Rule], name: str, body: dict[str, Any]
):
    with pytest.raises(RequestRejected) as refused:
        check_fields(fields, body)
    assert refused.value.status == 400
    assert refused.value.field == name and name in str(refused.value)


def test_a_field_of_another_api_is_refused_with_the_name_of_the_one_to_give():
    with pytest.raises(RequestRejected, match="did you mean 'max_output_tokens'"):
        check_fields(RESPONSES, {"max_tokens": 5})
    with pytest.raises(RequestRejected, match="does not have this field; leave it out"):
        check_fields(RESPONSES, {"wishes": 5})
    check_fields(RESPONSES, {"wishes": None})


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        *((fields, {"logit_bias": {}, "stop": [], "min_p": 0.0}) for fields in FIELDS.values()),
        *((fields, {"wishes": None, "n": 1, "best_of": 1}) for fields in FIELDS.values()),
        (CHAT, {"response_format": {"type": "text"}, "top_logprobs": 0, "store": True}),
        (CHAT, {"stream_options": {"include_usage": True}, "user": "u", "modalities": ["text"]}),
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "x",
                        "audio": None,
                        "function_call": None,
                        "refusal": None,
                        "annotations": [],
                        "provider_specific_fields": {"x": 1},
                    }
                ]
            },
        ),
        (RESPONSES, {"truncation": "disabled", "include": ["reasoning.encrypted_content"]}),
        (RESPONSES, {"text": {"format": {"type": "text"}}, "context_management": []}),
        (
            MESSAGES,
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        ),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"}}),
        (MESSAGES, {"system": [{"type": "text", "text": "x", "cache_control": {}}]}),
    ],
)
def test_a_value_that_changes_nothing_is_harmless(fields: Mapping[str, Rule], body: dict[str, Any]):
    assert check_fields(fields, body) == []


def test_tools_that_the_policy_cannot_have_and_hints_are_left_out_by_name():
    function = {"type": "function", "name": "f", "parameters": {}, "strict": True}
    body = {
        "tools": [function, {"type": "namespace", "name": "agents"}, {"type": "web_search"}, {}],
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["some.thing"],
    }
    assert check_fields(RESPONSES, body) == [
        "tools.strict",
        "tools[1] (namespace agents)",
        "tools[2] (web_search)",
        "tools[3] ()",
        "reasoning.effort",
        "include[0] (some.thing)",
    ]
    own = {"type": "bash_20250124", "name": "bash"}
    assert check_fields(MESSAGES, {"tools": [own, own]}) == [
        "tools[0] (bash_20250124 bash)",
        "tools[1] (bash_20250124 bash)",
    ]
    # what a library adds to a message is not worth a refusal
    assert check_fields(CHAT, {"messages": [{**ASKED[0], "mood": "x"}]}) == ["messages.mood"]
    assert check_fields(CHAT, {"temperature": 0, "reasoning_effort": "low"}) == [
        "temperature",
        "reasoning_effort",
    ]


def test_the_header_is_one_line_of_ascii_whatever_a_tool_is_called():
    body = {"tools": [{"type": "web_search", "name": f"é\r\nx: \0\x1b{n}"} for n in range(200)]}
    (text,) = left_out_header(check_fields(RESPONSES, body)).values()
    assert text.isascii() and text.isprintable() and len(text) <= 1_000
    assert left_out_header([]) == {}


def test_a_response_says_in_a_header_what_was_left_out_of_its_request(shared: Shared):
    tools = [{"type": "web_search"}]
    for path, body in (("chat/completions", BODY), ("responses", INPUT), ("messages", BODY)):
        answer = post(f"{shared.url}/v1/{path}", shared.key, json={**body, "tools": tools})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-streamrl-left-out"] == "tools[0] (web_search)"
        whole = post(f"{shared.url}/v1/{path}", shared.key, json=cast(Any, body))
        assert "x-streamrl-left-out" not in whole.headers
        refused = post(f"{shared.url}/v1/{path}", shared.key, json={**body, "min_tokens": 5})
        assert refused.status_code == 400 and "min_tokens" in refused.text
