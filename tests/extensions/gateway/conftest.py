"""A gateway for tests that only ask it for what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.support.gateways import Gateways, gateways
from tests.support.waiting import patience


class Shared(NamedTuple):
    gateway: Gateways
    url: str
    key: str  # samples in session s0
    grading_key: str  # of session s0
    opening_key: str  # opens sessions
    api: openai.OpenAI


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with gateways(tmp_path_factory.mktemp("runs")) as gateway:
        url = gateway.start()
        begun = gateway.begin(url)
        key = begun["api_key"]
        api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=patience(30))
        yield Shared(gateway, url, key, begun["grading_key"], gateway.key(), api)


BODY = {"messages": [{"role": "user", "content": "q"}]}
INPUT = {"input": "q"}  # of the responses API
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": BODY,
    "/v1/responses": INPUT,
    "/v1/messages": BODY,
    "/inference/v1/generate": {"token_ids": [1, 2]},
}
PATHS = tuple(BODIES)


def post(url: str, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}" if key else "none", **fields.pop("headers", {})}
    return httpx.post(url, headers=headers, timeout=patience(30), **fields)
