"""Whatever JSON an agent sends, it is a request or it is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.envs.sessions.call_tree import CallTree
from streamrl.extensions.gateway.fields import FIELDS, check_fields, left_out_header
from streamrl.extensions.gateway.requests import (
    Answer,
    ChatRequest,
    RequestRejected,
    canonical_messages,
    parse_body,
)
from streamrl.extensions.gateway.server import DIALECTS
from tests.support.sessions import call

WORDS = (
    "role", "user", "assistant", "tool", "content", "text", "type", "function", "name", "id",
    "arguments", "{}", "[", "tool_calls", "tool_call_id", "tool_use", "tool_result", "tool_use_id",
    "input", "call_id", "output", "function_call", "function_call_output", "message", "parameters",
)  # fmt: skip
NAMES = (
    "messages", "input", "tools", "tool_choice", "system", "instructions", "n", "max_tokens",
    "token_ids", "sampling_params", "previous_response_id", "text", "stop", "stream", "logit_bias",
)  # fmt: skip
leaves = st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.sampled_from(WORDS)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5)
    ),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)


@settings(max_examples=60)
@pytest.mark.parametrize("path", DIALECTS)
@given(body=bodies)
def test_no_body_breaks_a_dialect(path: str, body: dict[str, Any]):
    dialect = DIALECTS[path]
    tree = CallTree()
    tree.add(call("known", [1], [2]))
    with suppress(RequestRejected):
        names = check_fields(FIELDS[path], body)
        assert bool(left_out_header(names)) == bool(names)
    try:
        request = dialect.parse(body, tree)
    except RequestRejected as refused:
        assert 400 <= refused.status < 500 and str(refused)
        assert dialect.error(refused)
    else:
        assert request.messages or request.token_ids
        assert request.digest() == dialect.parse(body, tree).digest()


@pytest.mark.parametrize("properties", [5, [5], "text"])
def test_a_tool_whose_arguments_cannot_be_named_is_refused_before_it_is_sampled_for(
    properties: Any,
):
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "q"}], "tools": [tool]}
    with pytest.raises(RequestRejected, match="the parameters of 'add' are a JSON schema"):
        DIALECTS["/v1/chat/completions"].parse(body, CallTree())


def test_requests_that_ask_for_the_same_have_the_same_digest():
    one = [{"role": "user", "content": "q"}]
    requests = [
        ChatRequest(messages=one),
        ChatRequest(messages=one, n=2),
        ChatRequest(messages=one, max_tokens=3),
        ChatRequest(messages=[{"content": "q", "role": "user"}]),
        ChatRequest(messages=one, chat_template_kwargs={"enable_thinking": False}),
    ]
    digests = [request.digest() for request in requests]
    assert digests[0] == digests[3] and len(set(digests)) == 4
    recorded = "4cca31bfed82ea87717d9ef264e852f1"
    assert digests[0] == recorded, "a request that is asked again after an upgrade has its answer"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_an_answer_that_the_log_has_twice_is_answered_with_the_first(path: str):
    """A record that somebody forged may be a further choice of a request that asked for one."""
    calls = [call("a", [1], [2]), call("b", [1], [3])]
    answer = Answer(calls, [np.array([1, 2]), np.array([1, 3])])
    body = {"messages": [{"role": "user", "content": "q"}], "input": "q"}
    response = str(DIALECTS[path].response(body, answer))
    assert "said in a" in response and "said in b" not in response


def test_a_body_may_be_nested_and_not_without_end():
    assert parse_body(b'{"a":' + b"[" * 200 + b"]" * 200 + b"}")
    for depth in (900, 100_000):
        with pytest.raises(RequestRejected, match="nested too deeply|can be read"):
            parse_body(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


def test_an_item_of_the_responses_api_brings_no_calls_of_its_own():
    said = {"role": "assistant", "content": "x", "tool_calls": "abc"}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given = {"type": "function_call_output", "call_id": "c", "output": "3"}
    body = {"input": [{"role": "user", "content": "q"}, said, called, given]}
    request = DIALECTS["/v1/responses"].parse(body, CallTree())
    assert [len(message.get("tool_calls", ())) for message in request.messages] == [0, 1, 0]


def tool_call(identity: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {"id": identity, "type": "function", "function": function}


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ({"role": "x", "content": "q"}, "the role 'x' is none of system, "),
        ({"role": ["user"], "content": "q"}, "the role .* is none of system, "),
        ({"role": "user", "content": "q", "name": "n" * 257}, "at most 256 characters"),
        ({"role": "tool", "content": "q", "tool_call_id": "n" * 257}, "at most 256 characters"),
        ({"role": "assistant", "tool_calls": [tool_call("i" * 257, "f")]}, "at most 256"),
        ({"role": "assistant", "tool_calls": [tool_call("i", "f" * 257)]}, "at most 256"),
    ],
)
def test_what_no_chat_template_shows_is_bounded(message: dict[str, Any], cause: str):
    with pytest.raises(RequestRejected, match=cause):
        canonical_messages([message], "messages")


def test_names_and_ids_up_to_the_bound_are_kept():
    message = {
        "role": "assistant",
        "content": "",
        "name": "n" * 256,
        "tool_calls": [tool_call("i" * 256, "f" * 256)],
    }
    question = {"role": "user", "content": "q"}
    assert canonical_messages([message, question], "messages") == [message, question]
