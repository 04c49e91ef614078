"""Where a server listens, what is said if it cannot, and how it ends."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from streamrl.system.errors import ConfigError, PortTaken
from streamrl.system.http_server import HttpServerThread, open_listener, url_of
from tests.support.waiting import patience, until

WORDS = ("the gateway", "gateway.host", "set gateway.port to another one")


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_any_free_port_is_taken_and_a_port_that_is_taken_is_said(host: str, shown: str):
    with open_listener(host, 0, *WORDS) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://{shown}:{port}"
        cause = f"the gateway cannot listen on {host}:{port} .*; set gateway.port"
        with pytest.raises(PortTaken, match=cause):
            open_listener(host, port, *WORDS)


def test_an_address_that_is_none_is_named():
    with pytest.raises(ConfigError, match="gateway.host ::nowhere: there is no such address"):
        open_listener("::nowhere", 0, *WORDS)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})


def test_an_application_is_served_until_the_block_ends_or_it_is_told_to_stop():
    with open_listener("127.0.0.1", 0, *WORDS) as listener:
        url = url_of(listener)
        with HttpServerThread(hello, listener, stop_timeout_s=1) as http:
            assert httpx.get(url, timeout=patience(30)).text == "hello"
            assert http.is_alive
            http.stop()
            until(lambda: not http.is_alive)
        with pytest.raises(httpx.TransportError):
            httpx.get(url, timeout=1.0)
