"""Records what a client sends to a gateway."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from starlette.requests import Request

from streamrl.extensions.gateway.server import HttpApi
from tests.clients.fixtures import to_fixture
from tests.clients.programs import PROGRAMS, play, scripted
from tests.support.gateways import gateways


def recorded(client: str) -> list[dict[str, Any]]:
    """The requests of a client's loop with a tool, as a fixture."""
    requests = list[dict[str, Any]]()
    named_call = HttpApi._named_call

    async def recording(self: HttpApi, request: Request) -> Any:
        name, body = await named_call(self, request)
        path = request.url.path
        requests.append({"path": path, "headers": dict(request.headers), "body": body})
        return name, body

    with (
        tempfile.TemporaryDirectory() as directory,
        gateways(Path(directory) / "runs", scripted(PROGRAMS[client])) as gateway,
        mock.patch.object(HttpApi, "_named_call", recording),
    ):
        url = gateway.start()
        play(client, url, gateway.begin(url)["api_key"], Path(directory))
        return to_fixture(requests, [call.call for call in gateway.calls()])
