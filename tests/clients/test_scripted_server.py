"""The server that scripts the answers: its tokens are the script's, the rest its vLLM's."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.clients.model import SPECIAL, TEMPLATE
from tests.clients.scripted_server import GENERATE, ScriptedServer
from tests.support.bpe import bpe
from tests.support.sampling_stub import SamplingStub

TOKENIZER = bpe(TEMPLATE, special=SPECIAL)
END = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with SamplingStub() as vllm, ScriptedServer("scripted", TOKENIZER) as scripted:
        assert isinstance(scripted, ScriptedServer)
        scripted.vllm = vllm.record()
        scripted.say = lambda prompt, choice: f"hello {choice}" if "user\nhello" in prompt else ""
        yield scripted


def generated(server: ScriptedServer, max_tokens: int, n: int = 1) -> list[dict[str, object]]:
    sampling = {"n": n, "max_tokens": max_tokens, "temperature": 1.0}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling}
    return httpx.post(server.url + GENERATE, json=body).raise_for_status().json()["choices"]


def test_an_answer_is_the_bytes_of_the_script_with_the_logprobs_of_vllm(server: ScriptedServer):
    one, other = generated(server, max_tokens=50, n=2)
    tokens = [*TOKENIZER.convert_tokens_to_ids([*"hello\u01200"]), END]
    assert one["token_ids"] == tokens != [*TOKENIZER.encode("hello 0"), END]
    assert one["logprobs"] == {
        "content": [{"token": "?", "logprob": -token / 512} for token in tokens]
    }
    assert one["weight_versions"] == [{"version": "3", "start": 0, "end": 8}]
    assert (one["text"], one["finish_reason"]) == ("hello 0", "stop")
    assert other["text"] == "hello 1"


def test_an_answer_that_the_request_bounds_is_cut_off(server: ScriptedServer):
    (cut,) = generated(server, max_tokens=3)
    assert (cut["text"], cut["finish_reason"]) == ("hel", "length")


def test_other_requests_are_answered_by_vllm(server: ScriptedServer):
    answer = httpx.post(f"{server.url}/detokenize", json={"tokens": [104, 105]})
    assert answer.json() == {"prompt": "hi"}


def test_it_is_on_servers_as_its_vllm_under_its_own_name(server: ScriptedServer):
    record = server.record()
    assert (record.server_id, record.pool) == ("inference-scripted-0", "scripted")
    assert (record.url, record.state, record.version) == (server.url, "ready", 3)
