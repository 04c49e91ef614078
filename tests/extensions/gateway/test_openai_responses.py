"""Responses, through the openai SDK and through openai-agents, as agents use them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.extensions.gateway.conftest import Shared
from tests.support.gateways import Gateways, gateways
from tests.support.sampling_stub import END, tool_call
from tests.support.waiting import patience

ADD: Any = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def client(gateway: Gateways, url: str, session: str = "s0") -> openai.OpenAI:
    opened = gateway.begin(url, session)
    return openai.OpenAI(
        base_url=opened["base_url"],
        api_key=opened["api_key"],
        max_retries=0,
        timeout=patience(30),
    )


def calls_a_tool(prompt: str, choice: int) -> str:
    return "it is 3" if "<tool>" in prompt else f"I add. {tool_call('add', b=2, a=1)}"


def test_a_conversation_goes_on_by_its_items_and_by_the_id_of_a_response(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        first = api.responses.create(model="policy", instructions="be brief", input="one")
        assert first.status == "completed" and first.output_text.startswith("answer")
        items: Any = [{"role": "user", "content": "one"}, *(o.to_dict() for o in first.output)]
        items.append({"role": "user", "content": "two"})
        by_items = api.responses.create(model="policy", instructions="be brief", input=items)
        by_id = api.responses.create(
            model="policy", instructions="be brief", input="two", previous_response_id=first.id
        )
        calls = gateway.calls()
    assert [call.continues for call in calls] == ["", calls[0].call, calls[0].call]
    assert calls[0].messages[0] == {"role": "system", "content": "be brief"}
    assert [bytes(c.prompt[c.prompt < END].tolist()) for c in calls[1:]] == [b"two", b"two"]
    assert by_items.id != by_id.id  # asked twice, answered twice
    assert by_id.usage and by_id.usage.output_tokens == len(calls[2].tokens)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_with_tools_goes_on_from_its_calls(tmp_path: Path, is_stream: bool):
    with gateways(tmp_path, calls_a_tool) as gateway:
        api = client(gateway, gateway.start())

        def ask(items: Any) -> Any:
            if not is_stream:
                return api.responses.create(model="policy", input=items, tools=[ADD])
            with api.responses.stream(model="policy", input=items, tools=[ADD]) as parts:
                kinds = [part.type for part in parts]
                assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
                return parts.get_final_response()

        items: Any = [{"role": "user", "content": "1+2"}]
        first = ask(items)
        text, made = first.output
        assert text.content[0].text == "I add." and made.arguments == '{"a": 1, "b": 2}'
        items += [item.to_dict() for item in first.output]
        items.append({"type": "function_call_output", "call_id": made.call_id, "output": "3"})
        assert ask(items).output_text == "it is 3"
        one, two = gateway.calls()
    assert two.continues == one.call and not two.fork


def test_an_answer_that_is_cut_off_is_incomplete(tmp_path: Path):
    with gateways(tmp_path, lambda prompt, choice: "x" * 50) as gateway:
        api = client(gateway, gateway.start())
        whole = api.responses.create(model="policy", input="one", max_output_tokens=4)
        assert whole.status == "incomplete" and whole.output_text == "xxxx"
        kinds = [
            part.type
            for part in api.responses.create(
                model="policy", input="one", max_output_tokens=4, stream=True
            )
        ]
        assert kinds[-1] == "response.incomplete"


@pytest.mark.parametrize("kind", ["responses", "chat"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_of_openai_agents_needs_nothing_but_the_url_and_the_key(
    tmp_path: Path, kind: str, is_stream: bool
):
    import agents  # takes seconds, which other workers need not spend

    with gateways(tmp_path, calls_a_tool) as gateway:
        opened = gateway.begin(gateway.start())

        async def play() -> str:
            api = openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
            model: Any = agents.OpenAIResponsesModel("policy", api)
            if kind == "chat":
                model = agents.OpenAIChatCompletionsModel("policy", api)

            @agents.function_tool
            def add(a: int, b: int) -> int:
                """Adds two numbers."""
                return a + b

            agent = agents.Agent("adder", instructions="add", model=model, tools=[add])
            config = agents.RunConfig(tracing_disabled=True)
            if is_stream:
                streamed = agents.Runner.run_streamed(agent, "1+2", run_config=config)
                async for _ in streamed.stream_events():
                    pass
                output = streamed.final_output
            else:
                output = (await agents.Runner.run(agent, "1+2", run_config=config)).final_output
            await api.close()
            return output

        assert asyncio.run(play()) == "it is 3"
        one, two = gateway.calls()
    assert two.continues == one.call and not two.fork
    assert two.messages[-1]["content"] == "3"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("tool_choice", "required"),
        ("previous_response_id", "resp_nobody"),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", 5),
        ("input", []),
        ("max_output_tokens", 0),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(shared: Shared, field: str, value: Any):
    with pytest.raises(openai.BadRequestError) as refused:
        shared.api.responses.create(model="policy", input="one", extra_body={field: value})
    assert refused.value.param == field and shared.gateway.calls() == []


def test_a_schema_of_the_answer_is_refused(shared: Shared):
    schema: Any = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format"):
        shared.api.responses.create(model="policy", input="one", text=schema)


PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_custom_tool_takes_a_text_and_the_conversation_continues_from_its_call(
    tmp_path: Path, is_stream: bool
):
    def say(prompt: str, choice: int) -> str:
        return "done" if "<tool>" in prompt else tool_call("patch", input="a\nb")

    with gateways(tmp_path, say) as gateway:
        api = client(gateway, gateway.start())

        def ask(items: Any) -> Any:
            if not is_stream:
                return api.responses.create(model="policy", input=items, tools=[PATCH])
            with api.responses.stream(model="policy", input=items, tools=[PATCH]) as parts:
                for _ in parts:
                    pass
                return parts.get_final_response()

        items: Any = [{"role": "user", "content": "change it"}]
        (made,) = ask(items).output
        assert made.type == "custom_tool_call" and made.name == "patch" and made.input == "a\nb"
        items.append(made.to_dict())
        items.append({"type": "custom_tool_call_output", "call_id": made.call_id, "output": "ok"})
        assert ask(items).output_text == "done"
        one, two = gateway.calls()
        asked = next(body for path, body in gateway.stub.asked if path.endswith("render"))
    assert two.continues == one.call and not two.fork
    (tool,) = asked["tools"]
    assert tool["function"]["description"] == (
        "Changes files.\nThe text has this grammar:\nstart: /x+/"
    )
    assert tool["function"]["parameters"]["required"] == ["input"]


def test_items_may_be_given_by_their_ids(tmp_path: Path):
    def say(prompt: str, choice: int) -> str:
        return "done" if "<tool>" in prompt else f"I add. {tool_call('add', a=1)}"

    with gateways(tmp_path, say) as gateway:
        url = gateway.start()
        api = client(gateway, url)
        items: Any = [{"role": "user", "content": "1+2"}]
        made = api.responses.create(model="policy", input=items, tools=[ADD, PATCH]).output
        items += [{"type": "item_reference", "id": made[0].id}, {"id": made[1].id}]
        output = {"type": "function_call_output", "call_id": made[1].call_id, "output": "3"}
        last = api.responses.create(model="policy", input=[*items, output], tools=[ADD, PATCH])
        assert last.output_text == "done"
        one, two = gateway.calls()
        other = client(gateway, url, "s1")
        with pytest.raises(openai.BadRequestError, match=f"no item {made[0].id}; send the item"):
            other.responses.create(model="policy", input=[*items, output])
    assert two.continues == one.call and not two.fork


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_are_an_item_and_come_back_or_not(tmp_path: Path, is_stream: bool):
    with gateways(tmp_path, lambda prompt, choice: "<think>\n2+2\n</think>\n\n4") as gateway:
        api = client(gateway, gateway.start())

        def ask(items: Any, **fields: Any) -> Any:
            if not is_stream:
                return api.responses.create(model="policy", input=items, **fields)
            with api.responses.stream(model="policy", input=items, **fields) as parts:
                for _ in parts:
                    pass
                return parts.get_final_response()

        items: Any = [{"role": "user", "content": "2+2"}]
        answer = ask(items, reasoning={"summary": "auto"})
        thought, text = answer.output
        assert thought.type == "reasoning" and thought.content[0].text == "2+2"
        assert thought.summary[0].text == "2+2" and answer.output_text == "4"
        assert ask(items).output[0].summary == []
        for sent in ([thought.to_dict(), text.to_dict()], [text.to_dict()]):
            ask([*items, *sent, {"role": "user", "content": "and?"}])
        calls = gateway.calls()
    assert [call.continues for call in calls[2:]] == [calls[0].call] * 2
    assert not any(call.fork for call in calls)
