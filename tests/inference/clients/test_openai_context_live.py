"""A real vLLM that serves a BPE tokenizer: InferenceContext on its ids and printed tokens, and
conversations that go on token for token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from streamrl.config.sections.envs import Env
from streamrl.config.sections.learner import TinyModel
from streamrl.config.sections.serving import Inference
from streamrl.envs.sessions.tool_calls import function_tool
from streamrl.inference.clients.client import Client
from streamrl.inference.clients.openai_context import InferenceContext
from streamrl.inference.clients.prefix import Prefix
from streamrl.inference.servers import vllm_process
from streamrl.inference.servers.engine import Engine
from streamrl.inference.servers.vllm_launch import MODEL, VllmLaunch
from streamrl.stream.records import Server
from tests.support.bpe import bpe, byte_tokens

pytestmark = [pytest.mark.live, pytest.mark.slow]
PROMPTS = ["hello world", "caf\u00e9 \u20ac\U0001f600?", "two  plus\n\ntwo <eos> four"]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, Path]]:
    from streamrl.learner.initial import write_llama  # JAX

    directory = tmp_path_factory.mktemp("bpe")
    write_llama(directory / "model", bpe(), TinyModel(), 256)
    settings = Inference(max_model_len=256, max_num_seqs=8)
    launch = VllmLaunch(settings, directory / "model", directory / "log")
    process = vllm_process.start(launch, threading.Event())
    Engine(process.url, process.key).set_version(0)
    try:
        yield openai.OpenAI(base_url=f"{process.url}/v1", api_key="none"), directory / "model"
    finally:
        process.stop()


def ask(client: openai.OpenAI, prompt: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": prompt}]
    sampling = {"logprobs": True, "top_logprobs": 0, "max_tokens": 60, "temperature": 1.0, "n": 2}
    return client.chat.completions.create(
        model=MODEL,
        messages=messages,
        **sampling,
        extra_body={"skip_special_tokens": False, **options},
    )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_its_ids_make_an_aligned_rollout(serving: tuple[openai.OpenAI, Path], prompt: str):
    client, directory = serving
    context = InferenceContext.of_model(directory, 1.0, 0)
    completion = ask(client, prompt, return_token_ids=True)
    for choice in completion.choices:
        made = context.create_rollout_from_choice(
            prompt, choice, "e", "1", 1.0, prompt_token_ids=completion.prompt_token_ids
        )
        asked, answer = made.turns
        assert (
            made.misaligned == ""
            and asked.tokens is not None
            and asked.tokens.tolist() == completion.prompt_token_ids
        )
        assert (
            answer.tokens is not None
            and answer.tokens.tolist() == choice.token_ids
            and len(choice.token_ids) >= 5
        )
        assert (
            answer.logprobs is not None
            and len(answer.logprobs) == len(answer.tokens)
            and (answer.logprobs < 0).all()
        )
    assert context.metrics()["inference_context/misaligned"] == 0


def test_the_tokens_it_prints_by_id_are_the_same(serving: tuple[openai.OpenAI, Path]):
    client, directory = serving
    context = InferenceContext.of_model(directory, 1.0, 0)
    completion = ask(client, PROMPTS[1], return_token_ids=True, return_tokens_as_token_ids=True)
    for choice in completion.choices:
        sent = list(choice.token_ids)
        choice.token_ids = None
        assert context.response_tokens_from_choice(choice).tolist() == sent


def test_the_text_it_prints_is_refused_not_guessed_at(serving: tuple[openai.OpenAI, Path]):
    """An untrained policy says every kind of token; decoded, those with a space or half a character
    are in no vocabulary.
    """
    client, directory = serving
    context = InferenceContext.of_model(directory)
    refused = 0
    for _ in range(4):
        for choice in ask(client, PROMPTS[0]).choices:
            try:
                context.response_tokens_from_choice(choice)
            except ValueError as error:
                refused += "no token of the vocabulary" in str(error)
    assert refused


def test_another_template_is_noticed_and_never_trained_on(serving: tuple[openai.OpenAI, Path]):
    client, _ = serving
    completion = ask(client, PROMPTS[0], return_token_ids=True)
    context = InferenceContext(bpe("{{ messages[0]['content'] }}"), 1.0, 0)
    made = context.create_rollout_from_choice(
        PROMPTS[0],
        completion.choices[0],
        "e",
        "1",
        1.0,
        prompt_token_ids=completion.prompt_token_ids,
    )
    assert "is it the served model's tokenizer and template?" in made.misaligned
    assert context.metrics()["inference_context/misaligned"] == 1


async def test_a_conversation_keeps_what_was_sampled_where_the_tokenizer_would_cut_it_otherwise(
    serving: tuple[openai.OpenAI, Path],
):
    """Answers as a policy may sample them, byte by byte: their text comes back as other tokens, and
    none of those is used.
    """
    api, directory = serving
    tokenizer: Any = InferenceContext.of_model(directory).tokenizer
    url = str(api.base_url).removesuffix("/v1/")
    client = Client(heartbeat_s=60.0)
    cut_otherwise = 0
    client.on_server("a", Server(server_id="a", url=url, state="ready", max_model_len=256))
    try:
        for prompt in PROMPTS:
            talk: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
            (first,) = await client.sample(talk, 1, Env(max_tokens=5))
            for answer in (
                "hello hello",
                "caf\u00e9 \u20ac\U0001f600",
                "two  plus\n\n",
                "<|tool|>four",
            ):
                history = [
                    *first.prompt_tokens.tolist(),
                    *byte_tokens(tokenizer, answer),
                    tokenizer.eos_token_id,
                ]
                more = [
                    *talk,
                    {"role": "assistant", "content": answer},
                    {"role": "tool", "content": "two", "tool_call_id": "call-0"},
                ]
                (second,) = await client.sample(more, 1, Env(max_tokens=5), prefix=Prefix(history))
                cut_otherwise += (
                    tokenizer.apply_chat_template(more, add_generation_prompt=True)[: len(history)]
                    != history
                )
                assert (
                    second.prefix_tokens == len(history)
                    and second.prompt_tokens.tolist()[: second.prefix_tokens] == history
                ), answer
                assert (
                    tokenizer.decode(second.prompt_tokens[second.prefix_tokens :])
                    == "\n<|tool|>two<eos>\n<|assistant|>"
                )
            other = [
                *talk,
                {"role": "assistant", "content": "another answer"},
                {"role": "tool", "content": "two", "tool_call_id": "call-0"},
            ]
            (fork,) = await client.sample(other, 1, Env(max_tokens=5), prefix=Prefix(history))
            assert (
                fork.prefix_tokens == 0
                and fork.prompt_tokens.tolist()
                == tokenizer.apply_chat_template(other, add_generation_prompt=True)
            )
    finally:
        await client.close()
    assert cut_otherwise >= 6


async def test_an_answer_of_half_characters_is_kept_or_forks_and_never_mixed(
    serving: tuple[openai.OpenAI, Path],
):
    """An untrained policy samples bytes that are no text; what a server prints of them need not
    come back as it was.
    """
    api, directory = serving
    tokenizer: Any = InferenceContext.of_model(directory).tokenizer
    client = Client(heartbeat_s=60.0)
    talk = [{"role": "user", "content": PROMPTS[0]}]
    client.on_server(
        "a",
        Server(
            server_id="a",
            url=str(api.base_url).removesuffix("/v1/"),
            state="ready",
            max_model_len=256,
        ),
    )
    try:
        for first in await client.sample(talk, 6, Env(max_tokens=20)):
            history = [
                *first.prompt_tokens.tolist(),
                *(t for t in first.tokens.tolist() if t != tokenizer.eos_token_id),
                tokenizer.eos_token_id,
            ]
            more = [
                *talk,
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": "two"},
            ]
            (second,) = await client.sample(more, 1, Env(max_tokens=5), prefix=Prefix(history))
            rendered = tokenizer.apply_chat_template(more, add_generation_prompt=True)
            prompt = second.prompt_tokens.tolist()
            assert prompt[: second.prefix_tokens] == (history if second.prefix_tokens else []) and (
                second.prefix_tokens or prompt == rendered
            )
    finally:
        await client.close()


async def test_tools_are_told_to_the_template_of_a_server_without_a_parser(
    serving: tuple[openai.OpenAI, Path],
):
    api, _ = serving
    client = Client(heartbeat_s=60.0)
    properties = {"numbers": {"type": "string", "description": "what to add"}}
    parameters = {"type": "object", "properties": properties, "required": ["numbers"]}
    tool = function_tool("add", "Adds", parameters)
    client.on_server(
        "a",
        Server(
            server_id="a",
            url=str(api.base_url).removesuffix("/v1/"),
            state="ready",
            max_model_len=256,
        ),
    )
    try:
        (sampled,) = await client.sample(
            [{"role": "user", "content": PROMPTS[0]}], 1, Env(max_tokens=5), [tool]
        )
    finally:
        await client.close()
    assert len(sampled.tokens) == 5 or sampled.finish_reason == "stop"
