"""What of a body runs in the event loop of a gateway, and what in its other thread."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from streamrl.extensions.gateway import (
    anthropic_messages,
    bodies,
    calls,
    openai_chat,
    openai_responses,
    token_ids,
)
from streamrl.system.offloading import INLINE_BYTES
from tests.extensions.gateway.conftest import BODIES, Shared, post
from tests.support.waiting import patience

# All that goes through a body.
STEPS = (
    (bodies, "parse_body"),
    (bodies, "check_fields"),
    (openai_chat, "canonical_messages"),
    (openai_responses, "canonical_messages"),
    (anthropic_messages, "canonical_messages"),
    (token_ids, "is_token"),
    (calls, "parsed_request"),
    (openai_responses, "input_items"),
)
LARGE = {
    **BODIES,
    "/v1/responses/input_tokens": BODIES["/v1/responses"],
    "/v1/messages/count_tokens": BODIES["/v1/messages"],
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """By step, the threads in which it has run."""
    seen: dict[str, set[str]] = {}
    for module, name in STEPS:
        function = getattr(module, name)

        def noted(*args: Any, name: str = name, function: Any = function) -> Any:
            seen.setdefault(name, set()).add(threading.current_thread().name)
            return function(*args)

        monkeypatch.setattr(module, name, noted)
    return seen


@pytest.mark.parametrize("path", LARGE)
def test_no_step_of_a_large_body_runs_in_the_event_loop(
    shared: Shared, threads: dict[str, set[str]], path: str
):
    content = json.dumps(LARGE[path]).encode() + b" " * INLINE_BYTES
    headers = {"content-type": "application/json"}
    answer = post(shared.url + path, shared.key, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    assert {"parse_body", "check_fields", "parsed_request"} < threads.keys()
    assert set.union(*threads.values()) == {"large-requests_0"}


@pytest.mark.parametrize("path", BODIES)
def test_a_small_body_is_read_in_the_event_loop(
    shared: Shared, threads: dict[str, set[str]], path: str
):
    assert post(shared.url + path, shared.key, json=BODIES[path]).status_code == 200
    assert set.union(*threads.values()) == {"http"}


def test_a_large_body_of_a_reward_is_read_in_the_other_thread(
    shared: Shared, threads: dict[str, set[str]]
):
    refused = post(
        f"{shared.url}/rl/set_reward", shared.grading_key, json={"name": "x" * INLINE_BYTES}
    )
    assert refused.status_code == 400
    assert threads["parse_body"] == {"large-requests_0"}


def test_the_items_of_a_long_conversation_are_written_in_the_other_thread(
    shared: Shared, threads: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
):
    first = post(f"{shared.url}/v1/responses", shared.key, json={"input": "of two"}).json()["id"]
    monkeypatch.setattr("streamrl.system.offloading.INLINE_BYTES", 8)
    headers = {"authorization": f"Bearer {shared.key}"}
    path = f"{shared.url}/v1/responses/{first}/input_items"
    items = httpx.get(path, headers=headers, timeout=patience(20)).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["of two"]
    assert threads["input_items"] == {"large-requests_0"}
