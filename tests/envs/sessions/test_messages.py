"""Messages in one form: what differs between libraries does not count, what was said does."""

from __future__ import annotations

import pytest

from streamrl.envs.sessions.messages import EMPTY, canonical, digest

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"content": "hi", "role": "user"}),
        (
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ),
        (
            {"role": "assistant", "content": "hi"},
            {"role": "assistant", "content": "hi", "tool_calls": None, "refusal": None},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {**CALL, "function": {"name": "add", "arguments": '{ "b": 2, "a": 1 }'}}
                ],
            },
        ),
    ],
)
def test_what_differs_between_libraries_does_not_count(one: object, other: object):
    assert isinstance(one, dict)
    assert isinstance(other, dict)
    assert digest(EMPTY, [canonical(one)]) == digest(EMPTY, [canonical(other)])


def test_what_was_said_counts():
    said = [canonical({"role": "user", "content": text}) for text in ("a", "b")]
    assert digest(EMPTY, said) != digest(EMPTY, said[::-1])
    assert digest(digest(EMPTY, said[:1]), said[1:]) == digest(EMPTY, said)


def test_an_answer_that_calls_tools_is_known_by_its_calls():
    with_text = canonical({"role": "assistant", "content": "I add", "tool_calls": [CALL]})
    without = canonical({"role": "assistant", "content": "", "tool_calls": [CALL]})
    other = canonical({"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "c2"}]})
    assert digest(EMPTY, [with_text]) == digest(EMPTY, [without]) != digest(EMPTY, [other])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "hi"}, "a message has a role"),
        ({"role": "user"}, "a message of the user has no content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "reads text only"),
        ({"role": "user", "content": 7}, "the content of a message is text"),
        ({"role": "assistant", "tool_calls": 5}, "the tool calls of a message are a list, not 5"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "a tool call has an id"),
    ],
)
def test_what_is_no_message_is_refused(message: dict[str, object], why: str):
    with pytest.raises(ValueError, match=why):
        canonical(message)


def test_arguments_with_half_a_character_stay_as_they_are():
    arguments = '{"b": 1, "a": "\\ud83d"}'
    function = {"name": "f", "arguments": arguments}
    found = canonical({"role": "assistant", "tool_calls": [{"id": "c", "function": function}]})
    assert found["tool_calls"][0]["function"]["arguments"] == arguments
    assert digest(EMPTY, [found])
