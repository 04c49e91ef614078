"""What is posted to a server, and what is made of its answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from streamrl.inference.server_connection import (
    RequestFailed,
    RequestRejected,
    ServerConnection,
    reason_of,
)
from streamrl.inference.vllm_answers import Rendered
from tests.inference.stub import Stub, _Handler

RENDER = "/v1/chat/completions/render"


def run(url: str, scenario: Callable[[ServerConnection], Awaitable[Any]]) -> Any:
    async def play() -> Any:
        connection = ServerConnection(url)
        try:
            return await scenario(connection)
        finally:
            await connection.close()

    return asyncio.run(play())


def post(connection: ServerConnection) -> Awaitable[Rendered]:
    return connection.post(RENDER, {"model": "m"}, Rendered)


def test_requests_one_after_another_share_a_connection(monkeypatch: pytest.MonkeyPatch):
    ports = set[int]()
    handle = _Handler.do_POST

    def noted(self: _Handler) -> None:
        ports.add(self.client_address[1])
        handle(self)

    monkeypatch.setattr(_Handler, "do_POST", noted)

    async def three(connection: ServerConnection) -> None:
        for _ in range(3):
            assert (await post(connection)).token_ids == [1, 4, 10, 13, 17, 5]

    with Stub("a") as stub:
        run(stub.url, three)
    assert len(ports) == 1 and stub.asked == [(RENDER, {"model": "m"})] * 3


@pytest.mark.parametrize(
    ("mode", "kind", "reason"),
    [
        ("broken", RequestFailed, "EngineCore encountered an issue"),
        ("refuse", RequestRejected, "This model's maximum context length is 64 tokens"),
    ],
)
def test_an_error_of_the_server_has_its_message(mode: str, kind: type[Exception], reason: str):
    with Stub("a", mode) as stub, pytest.raises(RequestFailed, match=reason) as failed:
        run(stub.url, post)
    assert type(failed.value) is kind


def test_a_server_that_is_gone_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RequestFailed, match="connection error"):
        run(f"http://127.0.0.1:{port}", post)


@pytest.mark.parametrize("answer", [{}, [1, 2], "a page", None, {"token_ids": ["a"]}])
def test_an_answer_of_another_shape_is_an_error(answer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Stub, "answer", lambda self, path, body: (200, answer))
    with Stub("a") as stub, pytest.raises(ValueError):
        run(stub.url, post)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"error": {"message": "no\\nroom"}}', "no room"),
        (b'{"message": "busy"}', "busy"),
        (b'{"detail": "why"}', "status 502: {'detail': 'why'}"),
        (b"<html>\nBad  Gateway", "status 502: <html> Bad Gateway"),
        (b"", "status 502:"),
        (b"\xff", "status 502: \ufffd"),
    ],
)
def test_the_reason_is_the_message_of_an_error_or_all_of_it(content: bytes, reason: str):
    assert reason_of(httpx.Response(502, content=content)) == reason
