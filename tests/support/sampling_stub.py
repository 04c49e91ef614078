"""A vLLM whose tokens are bytes, and whose answers are a function of the prompt."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable
from typing import Any

from tests.inference.stub import Stub
from tests.support.waiting import patience

END = 256
ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
NAMES = {number: f"<{name}>" for name, number in ROLES.items()} | {END: "<end>"}

Say = Callable[[str, int], str]
"""The text of an answer, from the prompt as text and the number of the choice."""


def text_of(tokens: list[int]) -> str:
    text = ""
    pending = bytearray()
    for token in tokens:
        if token < END:
            pending.append(token)
            continue
        text += pending.decode("utf-8", "replace") + NAMES[token]
        pending.clear()
    return text + pending.decode("utf-8", "replace")


def rendered(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], asks: bool = True
) -> list[int]:
    """As a chat template would: tools first, each message with its role and its end. `asks`: the
    policy is to go on.
    """
    tokens = list[int]()
    if tools:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        tokens += [ROLES["system"], *f"tools: {names}".encode(), END]
    for message in messages:
        text = message["content"]
        for call in message.get("tool_calls", []):
            function = call["function"]
            text += (
                f'<tool_call>{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
            )
            text += "</tool_call>"
        tokens += [ROLES[message["role"]], *text.encode(), END]
    return [*tokens, ROLES["assistant"]] if asks else tokens


def by_checksum(prompt: str, choice: int) -> str:
    return f"answer {zlib.crc32(prompt.encode())} {choice}"


class SamplingStub(Stub):
    """`say` decides what it answers. While `gate` is not set, it samples nothing."""

    def __init__(self, name: str = "inference-0", say: Say = by_checksum) -> None:
        super().__init__(name)
        self.say = say
        self.gate = threading.Event()
        self.gate.set()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        match path.partition("?")[0]:
            case "/v1/chat/completions/render":
                asks = body.get("add_generation_prompt", True)
                tokens = rendered(body["messages"], body.get("tools") or [], asks)
                return 200, {"token_ids": tokens}
            case "/detokenize":
                return 200, {"prompt": text_of(body["tokens"])}
            case "/inference/v1/generate" if "prompt_logprobs" in body["sampling_params"]:
                given = [{str(token): {"logprob": -token / 512}} for token in body["token_ids"]]
                return 200, {"prompt_logprobs": [None, *given[1:]], "choices": [sampled("", 1)]}
            case "/inference/v1/generate":
                self.gate.wait(patience(30))
                sampling = body["sampling_params"]
                prompt = text_of(body["token_ids"])
                limit = sampling["max_tokens"]
                texts = [self.say(prompt, choice) for choice in range(sampling["n"])]
                return 200, {"choices": [sampled(text, limit) for text in texts]}
            case _:
                return super().answer(path, body)

    @property
    def sampled(self) -> int:
        """The number of requests for tokens that it has had."""
        return sum(path == "/inference/v1/generate" for path, _ in self.asked)


def sampled(text: str, limit: int) -> dict[str, Any]:
    tokens = [*text.encode(), END][:limit]
    is_whole = tokens[-1] == END
    return {
        "finish_reason": "stop" if is_whole else "length",
        "token_ids": tokens,
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
        "text": bytes(token for token in tokens if token < END).decode("utf-8", "replace"),
        "logprobs": {"content": [{"token": "?", "logprob": -token / 512} for token in tokens]},
    }


def tool_call(name: str, **arguments: Any) -> str:
    """How a policy writes a call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
