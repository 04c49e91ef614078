"""Token ids in, token ids out, as vLLM's `/inference/v1/generate`: for agents that tokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.envs.sessions.call_tree import CallTree
from streamrl.extensions.gateway.openai_chat import logprobs, weight_versions
from streamrl.extensions.gateway.requests import (
    MAX_CHOICES,
    Answer,
    Body,
    ChatRequest,
    Dialect,
    integer,
    openai_error,
    rejection,
)
from streamrl.stream.records import ModelCall
from streamrl.stream.records.compact import wide_ids

PATH = "/inference/v1/generate"
MAX_ID = (1 << 32) - 1


def parse(body: Body, tree: CallTree) -> ChatRequest:
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise rejection("sampling_params", "they are an object")
    tokens = body.get("token_ids")
    if not isinstance(tokens, list) or not tokens or not all(map(is_token, tokens)):
        raise rejection("token_ids", "they are the ids of a prompt: whole numbers, at least one")
    return ChatRequest(
        token_ids=tokens,
        n=integer(sampling, "n", 1, most=MAX_CHOICES),
        max_tokens=integer(sampling, "max_tokens", 0),
    )


def is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID


def response(body: Body, answer: Answer) -> dict[str, Any]:
    return {
        "request_id": answer.calls[0].call,
        "choices": [_choice(call) for call in answer.calls],
        "prompt_logprobs": None,
    }


def _choice(call: ModelCall) -> dict[str, Any]:
    return {
        "index": call.choice,
        "call": call.call,
        "token_ids": wide_ids(call.tokens).tolist(),
        "logprobs": {"content": logprobs(call)},
        "weight_versions": weight_versions(call),
        "text": call.text,
        "finish_reason": call.inference_metadata.finish_reason,
    }


def events(body: Body, finished: dict[str, Any]) -> list[tuple[str, Any]]:
    """None: a stream is refused (`parse`)."""
    return []


DIALECT = Dialect(PATH, parse, response, events, openai_error)
