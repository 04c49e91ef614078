"""Attacks by an env that is taken over on a server of the run, with the run's own key. S18 of the
review.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from streamrl.inference.servers.inside_vllm.streamrl_guard import Guard
from tests.attacks.table import Attack

KEYS = {
    "STREAMRL_AGENT_KEY": "a",
    "STREAMRL_RUN_KEYS": '{"run": "k"}',
    "STREAMRL_MAX_SAMPLES": "64",
}
INSIDE = "http://169.254.169.254/latest/meta-data"  # only the server's network reaches it
PICTURE = {"type": "image_url", "image_url": {"url": INSIDE}}


def asking(path: str, body: Any) -> str:
    """What comes of it, when an env asks for that."""
    reached = list[bytes]()

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        reached.append((await receive())["body"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "path": path, "headers": [(b"authorization", b"Bearer k")]}
    with patch.dict("os.environ", KEYS):
        asyncio.run(Guard(vllm)(scope, receive, send))
    return f"vLLM was asked for {reached[0][:60].decode()}" if reached else ""


def answers_without_end(directory: Path) -> str:
    sampling = {"n": 16_384, "max_tokens": 10**6, "ignore_eos": True}
    return asking("/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling})


def prompts_without_end(directory: Path) -> str:
    return asking("/v1/completions", {"prompt": ["1="] * 10_000})


def picture_from_inside(directory: Path) -> str:
    return asking("/v1/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]})


def picture_to_render(directory: Path) -> str:
    messages = [{"role": "user", "content": [{"type": "text", "text": "", "uuid": "1", **PICTURE}]}]
    return asking("/v1/chat/completions/render", {"messages": messages})


def picture_among_tokens(directory: Path) -> str:
    body = {"token_ids": [1], "sampling_params": {}, "content_parts": [PICTURE]}
    return asking("/inference/v1/generate", body)


WHERE = "inference/servers/inside_vllm/streamrl_guard.py"
ATTACKS = (
    Attack("S18", "thousands of endless answers", WHERE, answers_without_end),
    Attack("S18", "thousands of prompts in a request", WHERE, prompts_without_end),
    Attack("S18", "a picture from the server's network", WHERE, picture_from_inside),
    Attack("S18", "a picture from there, rendered only", WHERE, picture_to_render),
    Attack("S18", "a picture from there, among tokens", WHERE, picture_among_tokens),
)
