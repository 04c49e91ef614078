"""Requests and responses of the vLLM routes that are used here. Other fields are ignored."""

from __future__ import annotations

import base64
import io
import tokenize
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

MAX_EXPERT = 65_534  # Counted from 1 it is the largest uint16.


class RenderResponse(msgspec.Struct):
    """The answer of `/v1/chat/completions/render`."""

    token_ids: list[int]


class DetokenizeResponse(msgspec.Struct):
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
    # base64 of an .npy file (`experts_of`); where the server is told to report them
    routed_experts: str | None = None


class GenerateResponse(msgspec.Struct):
    """The answer of `/inference/v1/generate`."""

    choices: list[GeneratedChoice]


class ScoredChoice(msgspec.Struct):
    weight_versions: list[WeightVersions]


class LogprobResponse(msgspec.Struct):
    """The answer to a `logprob_request`. The first token of a prompt has no logprob."""

    prompt_logprobs: list[dict[str, TokenLogprob] | None]
    choices: list[ScoredChoice]


def logprob_request(model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """The request to `/inference/v1/generate` for the logprobs of given tokens at temperature 1,
    computed without the prefix cache. vLLM always samples at least one token more.
    """
    sampling = {
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
        "skip_reading_prefix_cache": True,
    }
    return {"model": model, "token_ids": list(tokens), "sampling_params": sampling}


def experts_of(choice: GeneratedChoice, tokens: int) -> np.ndarray | None:
    """The experts that each token of the prompt and the answer was sent to, as a Turn has them:
    (tokens, layers, k) uint8 or uint16, counted from 1. None where the server does not report them.

    The last token has none, because the server did not read it: its row is 0. Neither has a token
    at which the server has -1. Raises ValueError for an array of another shape, or of numbers that
    are no experts. `tokens`: of prompt and answer.
    """
    if choice.routed_experts is None:
        return None
    file = io.BytesIO(base64.b64decode(choice.routed_experts, validate=True))
    try:
        np.lib.format.read_magic(file)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"routed experts are no array ({error})") from None
    if len(shape) != 3 or shape[0] != tokens - 1 or dtype.kind not in "iu":
        raise ValueError(
            f"routed experts of shape {list(shape)} for {tokens} tokens,"
            f" expected [{tokens - 1}, layers, experts of a token]"
        )
    order = "F" if is_fortran else "C"
    experts = np.frombuffer(file.read(), dtype).reshape(shape, order=order)
    if experts.size and not -1 <= experts.min() <= experts.max() <= MAX_EXPERT:
        raise ValueError(f"routed experts from {experts.min()} to {experts.max()}, which are none")
    counted = np.zeros((tokens, *shape[1:]), np.int64)
    counted[:-1] = experts.astype(np.int64) + 1
    return counted.astype(np.uint8 if counted.max(initial=0) < 256 else np.uint16)
