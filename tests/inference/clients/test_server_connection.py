"""What is posted to a server, and what is made of its answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from threading import Thread
from typing import Any

import pytest

from streamrl.inference.clients.server_connection import (
    MAX_REASON,
    RequestFailed,
    Response,
    ServerConnection,
    ServerRejected,
    reason_of,
)
from streamrl.inference.clients.vllm_api import RenderResponse
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


def post(connection: ServerConnection) -> Awaitable[RenderResponse]:
    return connection.post(RENDER, {"model": "m"}, RenderResponse)


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
        ("refuse", ServerRejected, "This model's maximum context length is 64 tokens"),
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
        (b"[" * 100_000 + b"]" * 100_000, "status 502: " + "[" * (MAX_REASON - 12)),
    ],
)
def test_the_reason_is_the_message_of_an_error_or_all_of_it(content: bytes, reason: str):
    assert reason_of(Response(502, content)) == reason


async def answered(served: bytes) -> list[int] | str:
    """What is made of these bytes of a server, which then closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(served)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = ServerConnection(f"http://127.0.0.1:{port}")
    try:
        return (await post(connection)).token_ids
    except RequestFailed as error:
        return str(error)
    finally:
        await connection.close()
        server.close()


async def test_an_answer_may_come_in_chunks_or_end_with_the_connection():
    head = b"HTTP/1.1 200 OK\r\n"
    chunks = (
        b'transfer-encoding: chunked\r\n\r\n8\r\n{"token_\r\n8\r\nids":[1]\r\n1\r\n}\r\n0\r\n\r\n'
    )
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert await answered(early + head + chunks) == [1]
    assert await answered(head + b'\r\n{"token_ids": [2]}') == [2]


@pytest.mark.parametrize("field", [b"x", b"token_ids"])
async def test_an_answer_that_is_nested_without_end_is_one_of_another_shape(field: bytes):
    body = b'{"' + field + b'": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ValueError):
        await answered(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize(
    "served",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\n{",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_an_answer_that_is_cut_off_is_an_error(served: bytes):
    assert "connection error" in str(await answered(served))


@pytest.mark.parametrize(
    "behind", ["connection: close\r\n\r\n{body}", "\r\n{body}HTTP/1.1 200 OK\r\n"]
)
async def test_a_connection_that_the_server_ends_or_writes_to_unasked_is_used_once(behind: str):
    body = '{"token_ids": [1]}'
    served = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n" + behind.replace("{body}", body)
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.read(1 << 16):
            for byte in served.encode():  # an answer may come in any pieces
                writer.write(bytes([byte]))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = ServerConnection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for _ in range(2):
        assert (await post(connection)).token_ids == [1]
        await asyncio.sleep(0.05)  # what is written behind the answer comes
    await connection.close()
    server.close()
    assert connections == 2


async def test_a_request_that_is_given_up_takes_its_connection_with_it():
    with Stub("a", "held") as stub:
        connection = ServerConnection(stub.url)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await post(connection)
        stub.mode = "ok"
        assert (await post(connection)).token_ids == stub.rendered
        stub.kill()
        await connection.close()


async def test_a_key_of_two_lines_is_not_shown():
    connection = ServerConnection("http://127.0.0.1:1", "sesame\nopen")
    with pytest.raises(RequestFailed, match="one line") as failed:
        await post(connection)
    assert "sesame" not in str(failed.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 5_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n" + b"[" * 5_000,
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 5_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 500,
    ],
)
def test_an_answer_that_does_not_end_is_given_up(answer: bytes, monkeypatch: pytest.MonkeyPatch):
    """The connection stays open, and nothing more comes: only the length can be what ends it."""
    monkeypatch.setattr("streamrl.inference.clients.server_connection.MIN_ANSWER_BYTES", 1_000)
    monkeypatch.setattr("streamrl.inference.clients.server_connection.BYTES_PER_BYTE", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = list[socket.socket]()

        def serve() -> None:
            connection, _ = listener.accept()
            connections.append(connection)
            connection.recv(65_536)
            connection.sendall(answer)

        serving = Thread(target=serve)
        serving.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RequestFailed, match="longer than any to this request"):
            run(url, post)
        serving.join()
        for connection in connections:
            connection.close()
