"""Chat completions, through the openai SDK as agents use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from streamrl.inference.clients.openai_context import InferenceContext
from streamrl.stream.log.codec import encode
from streamrl.stream.records import SessionStart
from streamrl.stream.records.compact import wide_logprobs
from tests.extensions.gateway.conftest import Shared
from tests.support.bpe import bpe
from tests.support.gateways import Gateways, gateways
from tests.support.sampling_stub import END, tool_call
from tests.support.waiting import patience

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASKED: Any = [{"role": "user", "content": "one"}]


def client(gateway: Gateways, url: str, session: str = "s0", **fields: object) -> openai.OpenAI:
    opened = gateway.begin(url, session, **fields)
    return openai.OpenAI(
        base_url=opened["base_url"],
        api_key=opened["api_key"],
        max_retries=0,
        timeout=patience(30),
    )


def calls_a_tool(prompt: str, choice: int) -> str:
    return "done" if "<tool>" in prompt else f"I add. {tool_call('add', b=2, a=1)}"


def test_a_conversation_goes_on_token_for_token(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        conversation: Any = list(ASKED)
        for question in ("two", "three"):
            answer = api.chat.completions.create(model="policy", messages=conversation)
            conversation.append(answer.choices[0].message.to_dict())
            conversation.append({"role": "user", "content": question})
        start, first, second = gateway.records()
    assert isinstance(start, SessionStart) and start.problem_id == "7"
    assert second.continues == first.call and not second.fork
    assert bytes(second.prompt[second.prompt < END].tolist()) == b"two"
    assert second.messages == [{"role": "user", "content": "two"}]
    before = len(first.prompt) + len(first.tokens)
    assert answer.usage and answer.usage.prompt_tokens == before + len(second.prompt)
    assert answer.usage.completion_tokens == len(second.tokens)


def test_a_long_session_costs_the_log_what_it_says(tmp_path: Path):
    """Not what it says times the number of its calls."""
    with gateways(tmp_path, lambda prompt, choice: "yes") as gateway:
        api = client(gateway, gateway.start())
        conversation: Any = list(ASKED)
        for turn in range(30):
            answer = api.chat.completions.create(model="policy", messages=conversation)
            conversation.append({"role": "assistant", "content": answer.choices[0].message.content})
            conversation.append({"role": "user", "content": f"turn {turn:02}"})
        sizes = [len(encode(call)) for call in gateway.calls()]
    assert len(sizes) == 30 and abs(sizes[-1] - sizes[1]) < 10


def test_an_agent_with_tools_goes_on_from_its_calls(tmp_path: Path):
    with gateways(tmp_path, calls_a_tool) as gateway:
        api = client(gateway, gateway.start())
        first = api.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])
        said = first.choices[0]
        assert said.finish_reason == "tool_calls" and said.message.content == "I add."
        (made,) = said.message.tool_calls or []
        assert made.type == "function" and made.function.name == "add"
        assert json.loads(made.function.arguments) == {"a": 1, "b": 2}
        # as LangChain does, without the text and with empty fields
        sent = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [made.to_dict()],
        }
        conversation: Any = [
            *ASKED,
            sent,
            {"role": "tool", "tool_call_id": made.id, "content": "3"},
        ]
        last = api.chat.completions.create(model="policy", messages=conversation, tools=[ADD])
        assert last.choices[0].message.content == "done"
        assert last.choices[0].finish_reason == "stop"
        one, two = gateway.calls()
    assert two.continues == one.call and not two.fork
    assert one.text == f"I add. {tool_call('add', b=2, a=1)}" and one.content == "I add."


def test_its_answer_says_what_an_inference_context_needs(tmp_path: Path):
    """Ids, versions and the temperature, which no caller has to say."""
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        answer: Any = api.chat.completions.create(
            model="policy",
            messages=ASKED,
            n=2,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        (first, second) = gateway.calls()
    context = InferenceContext(bpe())
    made = [
        context.create_rollout_from_choice(
            "one", choice, "agent", "7", 1.0, prompt_token_ids=answer.prompt_token_ids
        )
        for choice in answer.choices
    ]
    for call, rollout in zip((first, second), made, strict=True):
        how = rollout.turns[1].inference_metadata
        assert how is not None
        assert how.version_spans == call.inference_metadata.version_spans
        assert rollout.policy_version == 3 and rollout.temperature == 1.0
        assert "tokenize_prompt" in rollout.misaligned  # the stub has another tokenizer
    assert made[0].rollout_uid != made[1].rollout_uid


def test_without_tools_or_with_none_a_call_is_text(tmp_path: Path):
    with gateways(tmp_path, calls_a_tool) as gateway:
        api = client(gateway, gateway.start())
        for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
            said = api.chat.completions.create(model="policy", messages=ASKED, **fields).choices[0]
            assert said.message.tool_calls is None and said.finish_reason == "stop"
            assert "<tool_call>" in (said.message.content or "")


@pytest.mark.parametrize("say", [calls_a_tool, lambda prompt, choice: f"answer {choice}"])
def test_a_stream_says_what_the_whole_answer_says(tmp_path: Path, say: Any):
    with gateways(tmp_path, say) as gateway:
        api = client(gateway, gateway.start())
        with api.chat.completions.stream(model="policy", messages=ASKED, tools=[ADD], n=2) as parts:
            for _ in parts:
                pass
            streamed = parts.get_final_completion()
        calls = gateway.calls()
        assert len(streamed.choices) == len(calls) == 2
        for choice, call in zip(streamed.choices, calls, strict=True):
            assert (choice.message.content or "") == (
                call.text if call.content is None else call.content
            )
            made = [tool.id for tool in choice.message.tool_calls or []]
            assert made == [tool["id"] for tool in call.tool_calls]
        usage = [
            part.usage
            for part in api.chat.completions.create(
                model="policy", messages=ASKED, stream=True, stream_options={"include_usage": True}
            )
        ]
    assert usage[-1] and usage[-1].completion_tokens and not any(usage[:-1])


def test_several_answers_have_calls_of_their_own(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        answer = api.chat.completions.create(
            model="policy",
            messages=ASKED,
            n=3,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        calls = gateway.calls()
        for choice, call in zip(answer.choices, calls, strict=True):
            more: Any = choice.model_extra
            assert more["call"] == call.call and more["token_ids"] == call.tokens.tolist()
            assert choice.logprobs and choice.logprobs.content
            said = [entry.logprob for entry in choice.logprobs.content]
            assert said == pytest.approx(wide_logprobs(call.logprobs).tolist())
        extra: Any = answer.model_extra
        assert extra["prompt_token_ids"] == calls[0].prompt.tolist()
        # the agent goes on from the second one, and then from the third
        for choice in answer.choices[1:]:
            conversation: Any = [*ASKED, choice.message.to_dict(), *ASKED]
            api.chat.completions.create(model="policy", messages=conversation)
        later = gateway.calls()[3:]
    assert [call.continues for call in later] == [call.call for call in calls[1:]]


def test_settings_of_the_env_count_and_fewer_tokens_may_be_asked_for(tmp_path: Path):
    with gateways(tmp_path, lambda prompt, choice: "x" * 1000) as gateway:
        api = client(gateway, gateway.start())
        for asked, given in ((5, 5), (1000, 200)):
            answer = api.chat.completions.with_raw_response.create(
                model="policy", messages=ASKED, temperature=0.1, max_completion_tokens=asked
            )
            assert answer.headers["x-streamrl-sampling"] == "temperature=1, top_p=1, top_k=-1"
            assert answer.parse().choices[0].finish_reason == "length"
            call = gateway.calls()[-1]
            assert len(call.tokens) == given and call.inference_metadata.temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"5": 3}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("response_format", {"type": "json_object"}),
        ("stop", ["x"]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("n", 0),
        ("n", True),
        ("max_tokens", "many"),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [*ASKED, {"role": "assistant", "content": "The answer is"}]),
        ("messages", [{"role": "critic", "content": "bad"}]),
        ("messages", [{"content": "no role"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("stream", "yes"),
        ("model", 7),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(shared: Shared, field: str, value: Any):
    with pytest.raises(openai.BadRequestError) as refused:
        shared.api.chat.completions.create(
            model="policy", messages=ASKED, extra_body={field: value}
        )
    assert refused.value.param == field and field in str(refused.value)
    assert shared.gateway.calls() == []


def test_variables_of_the_chat_template_are_those_of_the_env_and_of_the_request(tmp_path: Path):
    variables_of_env = {"enable_thinking": True, "date": "today"}
    with gateways(tmp_path) as gateway:
        gateway.run.envs["agent"].chat_template_kwargs.update(variables_of_env)
        api = client(gateway, gateway.start())
        for variables in ({"enable_thinking": False}, {}):
            api.chat.completions.create(
                model="policy",
                messages=ASKED,
                extra_body={"chat_template_kwargs": variables},
            )
        with pytest.raises(openai.BadRequestError, match="'tools' is given by streamrl and vLLM"):
            api.chat.completions.create(
                model="policy",
                messages=ASKED,
                extra_body={"chat_template_kwargs": {"tools": []}},
            )
        asked = [
            body["chat_template_kwargs"]
            for path, body in gateway.stub.asked
            if path.endswith("render")
        ]
    assert asked == [
        {"enable_thinking": False, "date": "today"},
        {"enable_thinking": True, "date": "today"},
    ]


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_are_no_content_and_the_conversation_continues_without_them(
    tmp_path: Path, is_stream: bool
):
    def say(prompt: str, choice: int) -> str:
        called = "" if "<tool>" in prompt else tool_call("add", a=1)
        return f"<think>\n2+2\n</think>\n\n{called or '4'}"

    with gateways(tmp_path, say) as gateway:
        api = client(gateway, gateway.start())

        def ask(messages: Any, **fields: Any) -> Any:
            asked: Any = {"model": "policy", "messages": messages, "tools": [ADD], **fields}
            if not is_stream:
                return api.chat.completions.create(**asked).choices[0].message
            with api.chat.completions.stream(**asked) as parts:
                for _ in parts:
                    pass
                return parts.get_final_completion().choices[0].message

        conversation: Any = list(ASKED)
        called = ask(conversation)
        assert called.reasoning_content == called.reasoning == "2+2" and not called.content
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "4"}
        conversation += [called.to_dict(), result]
        said = ask(conversation)
        assert said.reasoning_content == "2+2" and said.content == "4"
        hidden = ask(conversation, extra_body={"include_reasoning": False})
        assert hidden.content == "4" and not hasattr(hidden, "reasoning_content")
        for sent in (
            {"role": "assistant", "content": "4"},
            {"role": "assistant", "content": "4", "reasoning_content": "2+2"},
            {"role": "assistant", "content": "<think>2+2</think>4"},  # in another spelling
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "2+2"}, {"type": "text", "text": "4"}],
            },
        ):
            ask([*conversation, sent, *ASKED])
        calls = gateway.calls()
    assert calls[1].continues == calls[0].call
    assert [call.continues for call in calls[3:]] == [calls[1].call] * 4
    assert not any(call.fork for call in calls)


def test_thoughts_of_another_model_reach_the_chat_template(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        other: Any = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
        api.chat.completions.create(model="policy", messages=[*ASKED, other, *ASKED])
        asked = next(body for path, body in gateway.stub.asked if path.endswith("render"))
    assert asked["messages"][1] == {"role": "assistant", "content": "4", "reasoning": "2+2"}


def test_a_custom_tool_takes_a_text(tmp_path: Path):
    def say(prompt: str, choice: int) -> str:
        return "done" if "<tool>" in prompt else tool_call("patch", input="a\nb")

    custom: Any = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
    with gateways(tmp_path, say) as gateway:
        api = client(gateway, gateway.start())
        said = api.chat.completions.create(model="policy", messages=ASKED, tools=[custom])
        message = said.choices[0].message
        made: Any = (message.tool_calls or [])[0]
        assert made.type == "custom" and made.custom.input == "a\nb"
        result: Any = {"role": "tool", "tool_call_id": made.id, "content": "ok"}
        conversation: Any = [*ASKED, message.to_dict(), result]
        last = api.chat.completions.create(model="policy", messages=conversation, tools=[custom])
        assert last.choices[0].message.content == "done"
        one, two = gateway.calls()
    assert two.continues == one.call and not two.fork
