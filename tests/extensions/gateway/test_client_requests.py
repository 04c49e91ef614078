"""Requests of other people's clients, as those have sent them (tests/clients), sent again: each is
answered, and each turn of a conversation continues from the tokens that were sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrl.extensions.gateway import token_ids
from streamrl.extensions.gateway.fields import FIELDS, LEFT_OUT_HEADER
from streamrl.stream.records import ModelCall
from tests.clients import fixtures
from tests.clients.programs import PROGRAMS, TITLE, scripted
from tests.support.gateways import gateways
from tests.support.waiting import patience

# The calls that begin a conversation, by client: an SDK has one for each model class that is tried,
# opencode asks for a title.
BEGINNINGS = {"ai-sdk": 4, "langchain": 2, "opencode": 2, "pydantic-ai": 3}
LEFT_OUT = {
    "claude-code": "output_config.effort",
    "codex": "tools[4] (namespace multi_agent_v1), tools[8] (web_search)",
}


def replayed(name: str, directory: Path) -> tuple[list[httpx.Response], list[ModelCall]]:
    """The answers to the requests of a client, and their calls."""
    answers = list[httpx.Response]()
    with gateways(directory, scripted(PROGRAMS[name])) as gateway:
        url = gateway.start()
        headers = {"authorization": f"Bearer {gateway.begin(url)['api_key']}"}
        replay = fixtures.Replay(fixtures.read(name))
        for request in replay.requests():
            answers.append(
                httpx.post(
                    url + request["path"],
                    headers={**headers, **request["headers"]},
                    json=request["body"],
                    timeout=patience(30),
                )
            )
            assert answers[-1].status_code == 200, answers[-1].text
            replay.calls = [call.call for call in gateway.calls()]
        return answers, gateway.calls()


def test_every_client_has_its_requests():
    assert fixtures.names() == sorted(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_turn_of_a_client_continues_token_for_token(name: str, tmp_path: Path):
    answers, calls = replayed(name, tmp_path)
    assert len(answers) == len(calls)
    begun = [call for call in calls if not call.continues]
    assert len(begun) == BEGINNINGS.get(name, 1)
    # another conversation of the session has other first messages, and no turn was rewritten
    assert {call.fork for call in calls} <= {"", "sub-agent"}
    assert sum(bool(call.tool_calls) for call in calls) == len(
        [call for call in begun if call.text != TITLE]
    )
    for answer in answers:
        assert answer.headers.get(LEFT_OUT_HEADER, "") == LEFT_OUT.get(
            name, answer.headers.get(LEFT_OUT_HEADER, "")
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_requests_of_clients_have_no_texts_of_theirs(name: str):
    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for inner in value.values() for text in texts(inner)]
        if isinstance(value, list):
            return [text for inner in value for text in texts(inner)]
        return [value] if isinstance(value, str) else []

    for request in fixtures.read(name):
        for text in texts(request["body"]):
            is_ours = any(words in text for words in fixtures.OURS)
            is_name = " " not in text and len(text) <= fixtures.KEPT
            assert (
                is_ours
                or is_name
                or fixtures.TEXT.fullmatch(text)
                or text.startswith(fixtures.BILLING)
            ), text


def test_a_fixture_keeps_the_shape_and_is_replayed_with_new_ids():
    call = "0123456789abcdef01234567"
    requests = [
        {
            "path": "/v1/messages",
            "headers": {"anthropic-version": "1", "x-api-key": "secret"},
            "body": {
                "system": "Their long prompt",
                "messages": [{"role": "user", "content": "run echo hello"}],
                "tools": [{"name": "Bash", "description": "Their long prompt", "strict": True}],
                "cwd": "/home/somebody",
            },
        },
        {"path": "/v1/messages", "headers": {}, "body": {"id": f"call_{call}_0", "n": 2}},
    ]
    fixture = fixtures.to_fixture(requests, [call])
    text = "<text 0 of 17>"
    assert json.loads(json.dumps(fixture)) == [
        {
            "path": "/v1/messages",
            "headers": {"anthropic-version": "1"},
            "body": {
                "system": text,
                "messages": [{"role": "user", "content": "run echo hello"}],
                "tools": [{"name": "Bash", "description": text, "strict": True}],
                "cwd": "<text 1 of 14>",
            },
        },
        {"path": "/v1/messages", "headers": {}, "body": {"id": "call_<call-0>_0", "n": 2}},
    ]
    replay = fixtures.Replay(fixture)
    sent = replay.requests()
    first = next(sent)["body"]
    assert first["system"] == first["tools"][0]["description"] == "Text 0 is as long"
    assert first["cwd"] == "Text 1 is as l"
    replay.calls = ["new"]
    assert next(sent)["body"] == {"id": "call_new_0", "n": 2}


def test_the_requests_are_in_every_dialect_of_chat():
    paths = {request["path"] for name in PROGRAMS for request in fixtures.read(name)}
    assert paths == {path for path in FIELDS if path != token_ids.PATH}
