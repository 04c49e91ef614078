"""What a client can use up of an HTTP server before it has sent a request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from streamrl.system.http_connection import MAX_PIECES, Limits
from streamrl.system.http_server import HttpServerThread, open_listener
from tests.support.waiting import patience

HEAD = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\n"
GET = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
GET_LARGE = b"GET /large HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
LARGE = b"x" * (32 << 20)
PIECE = 1 << 20


class App:
    """Answers with the length of the body; a request for /early before it has read one, a request
    for /large with more than the kernel has room for.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()  # an answer has been sent, or given up

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        length = 0
        while scope["path"] != "/early":
            message = await receive()
            length += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = LARGE if scope["path"] == "/large" else str(length).encode()
        for first in range(0, len(body), PIECE):
            piece = {"type": "http.response.body", "body": body[first : first + PIECE]}
            await send({**piece, "more_body": first + PIECE < len(body)})
        self.ended.set()


@contextmanager
def served(app: App | None = None, **limits: Any) -> Iterator[tuple[str, int]]:
    with (
        open_listener("127.0.0.1", 0, "a test", "host", "") as listener,
        HttpServerThread(app or App(), listener, 1, 600, Limits(**limits)),
    ):
        yield listener.getsockname()


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=patience(30)) as client:
        yield client


def everything(client: socket.socket) -> bytes:
    """What the server sends until it ends the connection."""
    said = b""
    try:
        while piece := client.recv(65_536):
            said += piece
    except ConnectionResetError:
        pass
    return said


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        ({"head_s": 0.2}, b""),
        ({"head_s": 0.2}, HEAD),
        ({"body_s": 0.2}, HEAD + b"content-length: 5\r\n\r\n12"),
        ({"body_s": 0.2}, HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n2\r\n"),
    ],
)
def test_a_request_that_does_not_arrive_in_time_ends_its_connection(
    limits: dict[str, float], sent: bytes
):
    with served(**limits) as address, connected(address) as client:
        client.sendall(sent)
        assert everything(client) == b""


def test_a_body_that_nothing_reads_ends_its_connection_after_the_answer():
    early = b"POST /early HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\n"
    with served(linger_s=0.2) as address, connected(address) as client:
        client.sendall(early)
        assert everything(client).endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("head", [b"a: " + b"x" * 70_000, b"a: b\r\n" * 12_000])
def test_a_head_has_a_limit(head: bytes):
    with served() as address, connected(address) as client:
        client.sendall(HEAD + head)
        assert everything(client).startswith(b"HTTP/1.1 400 ")


def test_a_body_in_too_many_chunks_is_refused():
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    for pieces, status in ((MAX_PIECES, b"200"), (MAX_PIECES + 1, b"400")):
        with served() as address, connected(address) as client:
            client.sendall(head + b"1\r\nx\r\n" * pieces + b"0\r\n\r\n")
            assert client.recv(12).removeprefix(b"HTTP/1.1 ") == status


def test_silent_connections_keep_no_client_out():
    with served(connections=8) as address:
        silent = [socket.create_connection(address, timeout=patience(30)) for _ in range(20)]
        answer = httpx.post(f"http://{address[0]}:{address[1]}", content=b"abc")
        assert answer.text == "3"
        assert [everything(client) for client in silent[:8]] == [b""] * 8
        for client in silent:
            client.close()


def test_a_client_that_takes_no_answer_is_ended():
    app = App()
    with served(app, answer_s=0.2) as address, connected(address) as client:
        client.sendall(GET_LARGE)
        assert app.ended.wait(patience(30))


def test_an_answer_that_is_taken_slowly_arrives():
    with served(answer_s=patience(5.0)) as address, connected(address) as client:
        client.sendall(GET_LARGE)
        taken = 0
        while taken < len(LARGE):
            taken += len(client.recv(1 << 20))


def test_clients_that_take_no_answer_keep_no_client_out():
    with served(connections=8) as address:
        silent = [socket.create_connection(address, timeout=patience(30)) for _ in range(8)]
        for client in silent:
            client.sendall(GET_LARGE)
            assert client.recv(12) == b"HTTP/1.1 200"
        answers = [
            httpx.post(f"http://{address[0]}:{address[1]}", content=b"abc") for _ in range(8)
        ]
        assert [answer.text for answer in answers] == ["3"] * 8
        for client in silent:
            client.close()


def test_a_client_that_does_not_wait_for_its_answer_is_answered_once():
    with served() as address, connected(address) as client:
        client.sendall(GET * 3)
        assert everything(client).count(b"HTTP/1.1 200") <= 1
    with served() as address, connected(address) as client:
        for _ in range(3):
            client.sendall(GET)
            assert client.recv(65_536).startswith(b"HTTP/1.1 200")


def test_requests_follow_each_other_on_a_connection():
    with served(head_s=5.0) as address, httpx.Client() as client:
        url = f"http://{address[0]}:{address[1]}"
        assert [client.post(url, content=b"x" * n).text for n in (0, 100_000, 3)] == [
            "0",
            "100000",
            "3",
        ]
