"""What clients ask besides answers, through the SDKs where they have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.extensions.gateway.conftest import Shared, post
from tests.support.gateways import gateways
from tests.support.sampling_stub import tool_call
from tests.support.waiting import patience

ASKED: Any = [{"role": "user", "content": "one"}]
ADD: Any = {"type": "function", "name": "add", "parameters": {}, "strict": None}


def of_openai(opened: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=opened["base_url"],
        api_key=opened["api_key"],
        max_retries=0,
        timeout=patience(30),
    )


def test_models_are_those_of_the_servers_in_the_shape_of_both_apis(shared: Shared):
    theirs = anthropic.Anthropic(base_url=shared.url, api_key=shared.key, max_retries=0)
    assert [model.id for model in shared.api.models.list()] == ["policy"]
    assert shared.api.models.retrieve("policy").owned_by == "streamrl"
    assert [model.id for model in theirs.models.list()] == ["policy"]
    assert theirs.models.retrieve("policy").display_name == "policy"
    with pytest.raises(openai.NotFoundError, match="the policy is policy"):
        shared.api.models.retrieve("other/model")
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        theirs.models.retrieve("other")


def test_a_prompt_is_counted_as_it_would_be_sampled_for_and_nothing_is_sampled(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        opened = gateway.begin(url)
        theirs = anthropic.Anthropic(base_url=url, api_key=opened["api_key"], max_retries=0)
        given: Any = {"model": "policy", "messages": ASKED, "system": "be brief"}
        counted = theirs.messages.count_tokens(**given).input_tokens
        ours = of_openai(opened).responses.input_tokens.count(
            model="policy", instructions="be brief", input="one"
        )
        assert gateway.calls() == []
        answer = theirs.messages.create(**given, max_tokens=9)
        assert counted == ours.input_tokens == answer.usage.input_tokens
        # the tokens of an answer are those that were sampled
        more: Any = [*ASKED, {"role": "assistant", "content": answer.content}, *ASKED]
        counted = theirs.messages.count_tokens(**{**given, "messages": more}).input_tokens
        answer = theirs.messages.create(**{**given, "messages": more}, max_tokens=9)
        assert counted == answer.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="wishes"):
            theirs.messages.count_tokens(**given, extra_body={"wishes": 3})


def test_a_prompt_that_a_server_refuses_is_not_counted(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        key = gateway.begin(url)["api_key"]
        gateway.stub.mode = "refuse"
        body = {"model": "policy", "messages": ASKED}
        refused = post(f"{url}/v1/messages/count_tokens", key, json=body)
        assert refused.status_code == 400
        assert "maximum context length" in refused.json()["error"]["message"]
        gateway.stub.mode = "broken"
        refused = post(f"{url}/v1/responses/input_tokens", key, json={"input": "one"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"


def test_a_response_can_be_retrieved_with_what_was_asked_until_its_session_ends(tmp_path: Path):
    def say(prompt: str, choice: int) -> str:
        return "it is 3" if "<tool>" in prompt else tool_call("add", b=2, a=1)

    with gateways(tmp_path, say) as gateway:
        url = gateway.start()
        opened = gateway.begin(url)
        api = of_openai(opened)
        first = api.responses.create(
            model="policy", instructions="add", input="1+2", tools=[ADD], store=False
        )
        assert first.store is False
        made: Any = first.output[0]
        output: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "3"}
        second = api.responses.create(
            model="policy", input=[output], tools=[ADD], previous_response_id=first.id
        )
        again = api.responses.retrieve(second.id)
        assert again.output == second.output and again.usage == second.usage
        assert again.previous_response_id == first.id and again.id == second.id
        items = list(api.responses.input_items.list(second.id))
        assert [getattr(item, "role", item.type) for item in items] == [
            "function_call_output",
            "function_call",
            "user",
            "system",
        ]
        with pytest.raises(openai.NotFoundError, match="has no response"):
            api.responses.retrieve("resp_nobody")
        other = of_openai(gateway.begin(url, "s1"))
        with pytest.raises(openai.NotFoundError, match="has no response"):
            other.responses.retrieve(first.id)
        post(f"{url}/rl/end_session", opened["grading_key"], json={}).raise_for_status()
        with pytest.raises(openai.ConflictError, match="has ended"):
            api.responses.retrieve(first.id)


@pytest.mark.parametrize(
    ("method", "path", "is_anthropic"),
    [
        ("POST", "/v1/embeddings", False),
        ("POST", "/v1/completions", False),
        ("GET", "/v1/chat/completions", False),
        ("DELETE", "/v1/responses/resp_1", False),
        ("POST", "/v1/messages/batches", True),
        ("POST", "/nowhere", False),
        ("GET", "/", False),
    ],
)
def test_an_unknown_path_or_method_is_404_in_the_shape_of_the_api(
    shared: Shared, method: str, path: str, is_anthropic: bool
):
    for header in ({}, {"anthropic-version": "2023-06-01"}):
        answer = httpx.request(method, shared.url + path, headers=header)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["type"] == "not_found_error" and f"{method} {path}" in error["message"]
        assert ("param" not in error) == (is_anthropic or bool(header))
