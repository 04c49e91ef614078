"""A server of OpenEnv as an env: its own client steps it over a WebSocket, one connection an
episode. This runs in the env's own Python.

Each observation is a message of the user, and each answer of the policy an action. The rewards of
the steps add up.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openenv import GenericEnvClient  # pyright: ignore[reportMissingImports] # only in that Python
from streamrl_sessions import (
    Failed,
    GatewayClient,
    GatewayRefused,
    Outcome,
    Session,
    Settings,
    serve,
)

ABOUT_S = 60.0  # The server describes itself within so long.
MAX_ABOUT = 1 << 20  # bytes of it
TIMEOUT_S = 300.0  # of one answer of the policy
CONTEXT = "context_length_exceeded"  # The gateway's code for a prompt that is too long.


class OpenEnv:
    """The params of the run file: `resets`, the arguments of `reset` for each problem (without
    them problem n is `reset(seed=n)`); `text`, the field of an observation that the policy is shown
    (without it all of it, as JSON); `max_turns`.
    """

    def __init__(
        self,
        url: str,
        gateway: GatewayClient,
        resets: list[dict[str, Any]] | None = None,
        text: str = "",
        max_turns: int = 16,
    ) -> None:
        self.problems = len(resets or [])
        self._url = url.rstrip("/")
        self._gateway = gateway
        self._resets = resets
        self._text = text
        self._max_turns = max_turns
        self._action = fetch(f"{self._url}/schema")["action"]
        about = fetch(f"{self._url}/metadata")
        self.source = {
            "package": "openenv-core",
            "version": importlib.metadata.version("openenv-core"),
            "env": str(about.get("name", "")),
            "env_version": str(about.get("version", "")),
        }

    async def play(self, problem: int, session: Session) -> Outcome:
        arguments = self._resets[problem] if self._resets else {"seed": problem}
        messages: list[dict[str, str]] = []
        rewards: list[float] = []
        limit = "turns"
        async with GenericEnvClient(base_url=self._url) as client:
            result = await client.reset(**arguments)
            for _ in range(self._max_turns):
                if result.done:
                    break
                messages.append({"role": "user", "content": self._shown(result.observation)})
                answer = await self._ask(session, messages)
                if answer is None:
                    limit = "context"
                    break
                messages.append({"role": "assistant", "content": answer})
                result = await client.step(action_of(answer, self._action))
                if result.reward is not None:
                    rewards.append(float(result.reward))
        if not rewards:
            raise Failed("the env gave no reward")
        return Outcome({"reward": sum(rewards)}, "" if result.done else limit)

    async def _ask(self, session: Session, messages: list[dict[str, str]]) -> str | None:
        """The policy's answer; None if the context has no room for one."""
        body = {"model": "policy", "messages": messages}
        try:
            answer = await self._gateway.ask(
                "/v1/chat/completions", body, session.api_key, TIMEOUT_S
            )
        except GatewayRefused as error:
            if CONTEXT in str(error):
                return None
            raise Failed(str(error)) from None
        return answer["choices"][0]["message"]["content"] or ""

    def _shown(self, observation: dict[str, Any]) -> str:
        """What the policy is shown of an observation."""
        if not self._text:
            return json.dumps(observation, ensure_ascii=False)
        return str(observation[self._text])


def action_of(answer: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An action: a JSON object, or the value of the one field that the env requires. Raises Failed
    for anything else.
    """
    try:
        action = json.loads(answer)
    except (ValueError, RecursionError):  # a policy may answer anything
        action = answer
    if isinstance(action, dict):
        return action
    required = schema.get("required", [])
    if len(required) != 1:
        raise Failed(f"an action of this env is a JSON object with {', '.join(required)}")
    return {required[0]: answer}


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=ABOUT_S) as response:
        return json.loads(response.read(MAX_ABOUT))


@asynccontextmanager
async def make_env(settings: Settings) -> AsyncIterator[OpenEnv]:
    gateway = GatewayClient(settings.gateway, key="")
    yield await asyncio.to_thread(lambda: OpenEnv(settings.target, gateway, **settings.params))


if __name__ == "__main__":
    serve(make_env)
