"""What vLLM answers on the routes that the client asks. Other fields of an answer are ignored."""

from __future__ import annotations

import msgspec


class Rendered(msgspec.Struct):
    """The answer of `/v1/chat/completions/render`."""

    token_ids: list[int]


class Detokenized(msgspec.Struct):
    """The answer of `/detokenize`."""

    prompt: str


class TokenLogprob(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class WeightVersions(msgspec.Struct):
    """The version of the weights that made the tokens from `start` to `end`."""

    version: str | int
    start: int
    end: int


class GeneratedChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: Logprobs
    weight_versions: list[WeightVersions]
    text: str
    finish_reason: str


class Generated(msgspec.Struct):
    """The answer of `/inference/v1/generate`."""

    choices: list[GeneratedChoice]
