"""Messages, through the anthropic SDK as agents use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.extensions.gateway.conftest import Shared, post
from tests.support.gateways import Gateways, gateways
from tests.support.sampling_stub import END, tool_call
from tests.support.waiting import patience

if TYPE_CHECKING:
    import anthropic

ADD: Any = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ASKED: Any = [{"role": "user", "content": "1+2"}]


def client(gateway: Gateways, url: str, **fields: Any) -> anthropic.Anthropic:
    import anthropic  # takes seconds, which other workers need not spend

    opened = gateway.begin(url)
    return anthropic.Anthropic(
        base_url=opened["anthropic_base_url"],
        **(fields or {"api_key": opened["api_key"]}),
        max_retries=0,
        timeout=patience(30),
    )


def calls_a_tool(prompt: str, choice: int) -> str:
    return "it is 3" if "<tool>" in prompt else f"I add. {tool_call('add', b=2, a=1)}"


def test_a_conversation_goes_on_token_for_token(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        fields: Any = {"model": "policy", "max_tokens": 100, "system": "be brief"}
        first = api.messages.create(messages=ASKED, **fields)
        later: Any = [
            *ASKED,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
        ]
        second = api.messages.create(messages=later, **fields)
        one, two = gateway.calls()
    assert first.stop_reason == "end_turn" and first.id == f"msg_{one.call}"
    assert one.messages[0] == {"role": "system", "content": "be brief"}
    assert two.continues == one.call and not two.fork
    assert bytes(two.prompt[two.prompt < END].tolist()) == b"two"
    before = len(one.prompt) + len(one.tokens)
    assert second.usage.input_tokens == before + len(two.prompt)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_with_tools_goes_on_from_its_calls(tmp_path: Path, is_stream: bool):
    with gateways(tmp_path, calls_a_tool) as gateway:
        api = client(gateway, gateway.start())

        def ask(messages: Any) -> Any:
            fields: Any = {"model": "policy", "max_tokens": 100, "tools": [ADD]}
            if not is_stream:
                return api.messages.create(messages=messages, **fields)
            with api.messages.stream(messages=messages, **fields) as parts:
                for _ in parts:
                    pass
                return parts.get_final_message()

        first = ask(ASKED)
        text, made = first.content
        assert first.stop_reason == "tool_use" and text.text == "I add."
        assert made.name == "add" and made.input == {"a": 1, "b": 2}
        result = {"type": "tool_result", "tool_use_id": made.id, "content": "3"}
        later = [
            *ASKED,
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        assert ask(later).content[0].text == "it is 3"
        one, two = gateway.calls()
    assert two.continues == one.call and not two.fork
    assert two.messages == [{"role": "tool", "content": "3", "tool_call_id": made.id}]


def test_an_answer_that_is_cut_off_says_so_and_a_bearer_token_is_a_key(tmp_path: Path):
    with gateways(tmp_path, lambda prompt, choice: "x" * 50) as gateway:
        url = gateway.start()
        key = gateway.begin(url, "other")["api_key"]
        api = client(gateway, url, auth_token=key)
        answer = api.messages.create(model="policy", max_tokens=4, messages=ASKED)
        assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_sequences", ["x"]),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", "auto"),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [*ASKED, {"role": "assistant", "content": "I begin"}]),
        ("max_tokens", -1),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(shared: Shared, field: str, value: Any):
    import anthropic

    api = anthropic.Anthropic(base_url=shared.url, api_key=shared.key, max_retries=0)
    body: Any = {
        "model": "policy",
        "max_tokens": 9,
        "messages": ASKED,
        "extra_body": {field: value},
    }
    with pytest.raises(anthropic.BadRequestError, match=field) as refused:
        api.messages.create(**body)
    whole: Any = refused.value.body
    assert whole["type"] == "error" and whole["error"]["type"] == "invalid_request_error"


def prompt_of(tmp_path: Path, **body: Any) -> str:
    """The prompt that a request is sampled for."""
    prompts = list[str]()

    def say(prompt: str, choice: int) -> str:
        prompts.append(prompt)
        return "done"

    with gateways(tmp_path, say) as gateway:
        url = gateway.start()
        key = gateway.begin(url)["api_key"]
        asked = {"model": "policy", "max_tokens": 9, **body}
        post(f"{url}/v1/messages", key, json=asked).raise_for_status()
    return prompts[-1]


def test_system_messages_may_be_anywhere_and_a_billing_header_is_no_prompt(tmp_path: Path):
    prompt = prompt_of(
        tmp_path,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: build=1; n=2"},
            {"type": "text", "text": "be brief"},
        ],
        messages=[*ASKED, {"role": "system", "content": [{"type": "text", "text": "in French"}]}],
    )
    assert prompt == "<system>be brief<end><user>1+2<end><system>in French<end><assistant>"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"content": "no such file"}, "no such file"),
        ({"content": "no such file", "is_error": False}, "no such file"),
        ({"content": "no such file", "is_error": True}, "The tool failed.\nno such file"),
        ({"content": [{"type": "text", "text": "a"}], "is_error": True}, "The tool failed.\na"),
        ({"is_error": True}, "The tool failed."),
    ],
)
def test_that_a_tool_has_failed_is_in_its_message(
    tmp_path: Path, result: dict[str, Any], expected: str
):
    called = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
    given = [{"type": "tool_result", "tool_use_id": "t", **result}]
    prompt = prompt_of(
        tmp_path,
        messages=[
            *ASKED,
            {"role": "assistant", "content": called},
            {"role": "user", "content": given},
        ],
    )
    assert f"<tool>{expected}<end>" in prompt


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_are_blocks_for_who_asks_and_the_conversation_continues_without_them(
    tmp_path: Path, is_stream: bool
):
    with gateways(tmp_path, lambda prompt, choice: "<think>\n2+2\n</think>\n\n4") as gateway:
        url = gateway.start()
        api = client(gateway, url)

        def ask(messages: Any, **fields: Any) -> Any:
            asked = {"model": "policy", "max_tokens": 200, "messages": messages, **fields}
            if not is_stream:
                return api.messages.create(**asked)
            with api.messages.stream(**asked) as stream:
                return stream.get_final_message()

        plain = ask(ASKED)
        shown = ask(ASKED, thinking={"type": "adaptive"})
        hidden = ask(ASKED, thinking={"type": "adaptive", "display": "omitted"})
        for answer in (plain, hidden):
            assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "4"}]
        thought, text = shown.content
        assert thought.thinking == "2+2" and thought.signature and text.text == "4"
        for answer in (plain, shown):
            sent = [block.to_dict() for block in answer.content]
            ask([*ASKED, {"role": "assistant", "content": sent}, *ASKED])
        calls = gateway.calls()
    assert all(call.continues == calls[0].call and not call.fork for call in calls[3:])
    assert calls[0].text == "<think>\n2+2\n</think>\n\n4" and calls[0].content == "4"
