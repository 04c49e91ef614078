"""Where a replica listens, and what is said if it cannot."""

from __future__ import annotations

import pytest

from streamrl.errors import ConfigError, PortTaken
from streamrl.gateway.listening import listening, url_of


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_any_free_port_is_taken_and_a_port_that_is_taken_is_said(host: str, shown: str):
    with listening(host, 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://{shown}:{port}"
        with pytest.raises(PortTaken, match=f"cannot listen on {host}:{port} .*set gateway.port"):
            listening(host, port)


def test_an_address_that_is_none_is_named():
    with pytest.raises(ConfigError, match="gateway.host ::nowhere: there is no such address"):
        listening("::nowhere", 0)
