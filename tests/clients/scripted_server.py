"""A server whose answers are written in a script. Everything else is a real vLLM's, which it asks:
the tokens of prompts, and how likely the policy gives the scripted answers.
"""

from __future__ import annotations

import time
from typing import Any

import httpx
from msgspec import structs
from transformers import PreTrainedTokenizerFast

from streamrl.inference.clients.vllm_api import logprob_request
from streamrl.stream.records import Server
from tests.inference.stub import Stub
from tests.support.bpe import byte_tokens
from tests.support.sampling_stub import Say, by_checksum
from tests.support.waiting import patience

GENERATE = "/inference/v1/generate"
ANSWER_S = 600.0  # vLLM reads 24,000 tokens on two cores


class ScriptedServer(Stub):
    """`say` decides what it answers. It samples a token for each byte of that, as the tokenizer
    would not split it: a conversation that is tokenized again is seen as another one.
    """

    def __init__(self, pool: str, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(f"inference-{pool}-0")
        self.pool = pool
        self.say: Say = by_checksum
        self.vllm: Server | None = None  # the server that is asked, once it is ready
        self._tokenizer = tokenizer
        self._http = httpx.Client(timeout=patience(ANSWER_S))

    def record(self, **changes: Any) -> Server:
        """What this server is on `servers`: its vLLM, under another name."""
        assert self.vllm is not None
        own = {"server_id": self.name, "pool": self.pool, "url": self.url}
        return structs.replace(self.vllm, **own, heartbeat_s=time.time(), **changes)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path != GENERATE:
            return self._ask(path, body)
        prompt = body["token_ids"]
        sampling = body["sampling_params"]
        said = self._tokenizer.decode(prompt)
        choices = list[dict[str, Any]]()
        for number in range(sampling["n"]):
            end = self._tokenizer.eos_token_id
            tokens = [*byte_tokens(self._tokenizer, self.say(said, number)), end]
            tokens = tokens[: sampling["max_tokens"]]
            status, scored = self._ask(GENERATE, logprob_request(body["model"], prompt + tokens))
            if status != 200:
                return status, scored
            choices.append(self._choice(tokens, scored))
        return 200, {"choices": choices}

    def _choice(self, tokens: list[int], scored: Any) -> dict[str, Any]:
        """An answer of these tokens. `scored`: vLLM's answer to the request for their logprobs."""
        entries = scored["prompt_logprobs"][-len(tokens) :]
        logprobs = [
            entry[str(token)]["logprob"] for token, entry in zip(tokens, entries, strict=True)
        ]
        (choice,) = scored["choices"]
        version = choice["weight_versions"][0]["version"]
        is_whole = tokens[-1] == self._tokenizer.eos_token_id
        return {
            "finish_reason": "stop" if is_whole else "length",
            "token_ids": tokens,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
            "text": self._tokenizer.decode(tokens[:-1] if is_whole else tokens),
            "logprobs": {"content": [{"token": "?", "logprob": value} for value in logprobs]},
        }

    def _ask(self, path: str, body: Any) -> tuple[int, Any]:
        assert self.vllm is not None
        answer = self._http.post(self.vllm.url + path, json=body)
        return answer.status_code, answer.json()
