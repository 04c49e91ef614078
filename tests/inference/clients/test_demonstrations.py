"""Answers of others in the policy's own tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamrl.config.sections.envs import Env
from streamrl.inference.clients.client import (
    Client,
    ContextFull,
    SampledCompletion,
    SamplingRejected,
)
from streamrl.inference.clients.prefix import NO_PREFIX, Prefix
from tests.support.sampling_stub import END, ROLES, SamplingStub, text_of

QUESTION = [{"role": "user", "content": "3*4="}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "function": {"name": "calculator", "arguments": '{"e": "3*4"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "12"}


class WithoutEnds(SamplingStub):
    """Its template closes no answer."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, answer = super().answer(path, body)
        if path.endswith("/render"):
            answer = {"token_ids": [token for token in answer["token_ids"] if token != END]}
        return status, answer


class Trimming(SamplingStub):
    """Its template leaves out what was asked last, once it is answered."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/render") and body["messages"][-1]["role"] == "assistant":
            body = {**body, "messages": body["messages"][:-2] + body["messages"][-1:]}
        return super().answer(path, body)


class Versionless(SamplingStub):
    """Does not say which weights it has."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, answer = super().answer(path, body)
        if path.endswith("/generate"):
            answer["choices"][0]["weight_versions"] = []
        return status, answer


class Spaced(SamplingStub):
    """Its template writes a space before the end of each message."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, answer = super().answer(path, body)
        if path.endswith("/render"):
            spaced = list[int]()
            for token in answer["token_ids"]:
                spaced += [32, END] if token == END else [token]
            answer = {"token_ids": spaced}
        return status, answer


def demonstrated(
    stub: SamplingStub,
    messages: list[dict[str, Any]],
    answer: dict[str, Any],
    prefix: Prefix = NO_PREFIX,
    **server: Any,
) -> SampledCompletion:
    async def play() -> SampledCompletion:
        client = Client()
        client.on_server(stub.name, stub.record(**server))
        try:
            (made,) = await client.sample(messages, 1, Env(temperature=0.5), (), prefix, answer)
            return made
        finally:
            await client.close()

    with stub:
        return asyncio.run(play())


def test_an_answer_is_what_the_template_writes_with_what_the_policy_makes_of_it():
    made = demonstrated(SamplingStub(), QUESTION, {"role": "assistant", "content": "12"})
    assert text_of(made.prompt_tokens.tolist()) == "<user>3*4=<end><assistant>"
    assert made.tokens.tolist() == [*b"12", END]
    assert made.logprobs.tolist() == [-token / 512 for token in made.tokens.tolist()]
    assert (made.text, made.finish_reason, made.prefix_tokens) == ("12", "stop", 0)
    assert [(span.version, span.start, span.end) for span in made.version_spans] == [(3, 0, 3)]
    assert made.temperature == 1.0  # that of the logprobs


def test_a_call_of_a_tool_is_written_by_the_template_and_the_next_answer_goes_on_from_it():
    stub = SamplingStub()
    first = demonstrated(stub, QUESTION, CALL)
    assert first.text == (
        '<tool_call>{"name": "calculator", "arguments": {"e": "3*4"}}</tool_call>'
    )
    history = [*first.prompt_tokens.tolist(), *first.tokens.tolist()]
    conversation = [*QUESTION, CALL, RESULT]
    said = {"role": "assistant", "content": "12"}
    second = demonstrated(SamplingStub(), conversation, said, Prefix(history))
    assert second.prefix_tokens == len(history)
    after = second.prompt_tokens.tolist()[len(history) :]
    assert after == [ROLES["tool"], *b"12", END, ROLES["assistant"]]
    assert second.tokens.tolist() == [*b"12", END]


@pytest.mark.parametrize(
    ("stub", "says"),
    [
        (WithoutEnds(), "writes nothing after an answer"),
        (Trimming(), "does not write this answer after the prompt"),
    ],
)
def test_what_the_template_does_not_write_as_a_policy_answers_is_refused(
    stub: SamplingStub, says: str
):
    with pytest.raises(SamplingRejected, match=says):
        demonstrated(stub, QUESTION, {"role": "assistant", "content": "12"})


def test_an_empty_answer_is_the_token_that_ends_it():
    made = demonstrated(SamplingStub(), QUESTION, {"role": "assistant", "content": ""})
    assert (made.tokens.tolist(), made.text) == ([END], "")


def test_white_space_before_the_end_of_a_turn_belongs_to_the_answer():
    made = demonstrated(Spaced(), QUESTION, {"role": "assistant", "content": "12"})
    assert made.tokens.tolist() == [*b"12 ", END]


def test_a_context_that_has_no_room_for_the_answer_is_full():
    stub = SamplingStub()
    answer = {"role": "assistant", "content": "12345"}
    with pytest.raises(ContextFull, match="a prompt of 7 tokens leaves no room in a context of"):
        demonstrated(stub, QUESTION, answer, max_model_len=13)
    assert not stub.sampled
    assert len(demonstrated(SamplingStub(), QUESTION, answer, max_model_len=14).tokens) == 6


def test_an_answer_without_the_version_of_its_weights_is_asked_for_elsewhere():
    async def play(one: SamplingStub, other: SamplingStub) -> SampledCompletion:
        client = Client()
        client.on_server("one", one.record(server_id="one"))
        client.on_server("other", other.record(server_id="other"))
        try:
            answer = {"role": "assistant", "content": "12"}
            (scored,) = await client.sample(QUESTION, 1, Env(), (), NO_PREFIX, answer)
            return scored
        finally:
            await client.close()

    with Versionless() as one, SamplingStub() as other:
        assert asyncio.run(play(one, other)).text == "12"
        assert one.asked, "it was the first"
