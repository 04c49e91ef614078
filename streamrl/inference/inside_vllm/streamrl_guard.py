"""Runs inside vLLM's server, in front of everything, and decides who may ask for what.

- Whatever controls the server (pause it, load weights from a path, call a method of its workers, abort others' requests) is for its agent alone,
  which has made up a key for this one server. vLLM would do it for whoever reaches the port, with or without a key of its own.
- Sampling, and what goes with it, is for whoever sends the run's API key; for everybody when the run has none. It gives no control.
- `/health` says yes or no to everybody.

vLLM's Python has no streamrl, so: standard library only, found by PYTHONPATH, hence the long name and the directory of its own. The keys are in the
environment, where the process list does not show them.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = {"/health"}
SAMPLING = {
    *("/v1/models", "/v1/completions", "/v1/completions/render", "/v1/chat/completions", "/v1/chat/completions/render"),
    *("/inference/v1/generate", "/tokenize", "/detokenize", "/metrics"),
}
REFUSED = b'{"error": {"message": "this server does that for nobody who does not send the right API key", "code": 401}}'


class Guard:
    """ASGI middleware."""

    def __init__(self, app: App) -> None:
        self._app, self._agent, self._sampler = app, os.environ["STREAMRL_AGENT_KEY"], os.environ.get("STREAMRL_API_KEY", "")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may(scope["path"], [value for name, value in scope["headers"] if name == b"authorization"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": REFUSED})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may(self, path: str, sent: list[bytes]) -> bool:
        if path in OPEN or _has(sent, self._agent):
            return True
        return path in SAMPLING and (not self._sampler or _has(sent, self._sampler))


def _has(sent: list[bytes], key: str) -> bool:
    return bool(key) and any(hmac.compare_digest(value, b"Bearer " + key.encode()) for value in sent)
