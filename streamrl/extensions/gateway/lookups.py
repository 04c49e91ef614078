"""What clients ask besides answers: models, responses that were given, and how long a prompt is.

The answers have the fields of OpenAI's API and of Anthropic's where both have the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.keys import SessionName
from streamrl.extensions.gateway import openai_responses
from streamrl.extensions.gateway.calls import AgentRequest, ModelCallHandler
from streamrl.extensions.gateway.requests import RequestRejected
from streamrl.inference.clients.client import Client
from streamrl.system.offloading import Offloader

CREATED = "1970-01-01T00:00:00Z"  # A model has no date: it is trained while it is asked.


class LookupsApi:
    """Answers from what the log and the servers have. Nothing is sampled."""

    def __init__(
        self,
        run: RunFile,
        calls: ModelCallHandler,
        clients: Mapping[str, Client],
        offloader: Offloader,
    ) -> None:
        self._run = run
        self._offloader = offloader
        self._calls = calls
        self._clients = clients

    def models(self, env: str) -> dict[str, Any]:
        """The models that the servers of the env's pool have."""
        names = self._model_names(env)
        return {
            "object": "list",
            "data": [_model(name) for name in names],
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }

    def model(self, env: str, name: str) -> dict[str, Any]:
        """One of these models. Raises RequestRejected."""
        names = self._model_names(env)
        if name not in names:
            raise RequestRejected(
                404,
                f"there is no model {name!r}; the policy is {' or '.join(names) or 'not served'},"
                " and answers a call whatever model it names",
                "model",
                "model_not_found",
            )
        return _model(name)

    async def response(self, session: SessionName, identity: str) -> dict[str, Any]:
        """A response that the session was given. What the request had besides its conversation is
        not kept. Raises RequestRejected.
        """
        call = identity.removeprefix(openai_responses.ID)
        answer, _ = await self._calls.recorded_answer(session, call)
        previous = answer.calls[0].continues
        body: dict[str, Any] = {}
        if previous:
            body["previous_response_id"] = openai_responses.ID + previous
        return await self._offloader.run(
            str(session), answer.size, openai_responses.response, body, answer
        )

    async def input_items(self, name: SessionName, identity: str) -> bytes:
        """The conversation before a response as JSON, newest item first. Raises
        RequestRejected.
        """
        call = identity.removeprefix(openai_responses.ID)
        _, session = await self._calls.recorded_answer(name, call)

        def written() -> bytes:
            messages = session.tree.visible_conversation(call)[:-1]
            items = openai_responses.input_items(messages)[::-1]
            return msgspec.json.encode(
                {
                    "object": "list",
                    "data": items,
                    "has_more": False,
                    "first_id": items[0]["id"] if items else None,
                    "last_id": items[-1]["id"] if items else None,
                }
            )

        return await self._offloader.run(str(name), session.message_bytes, written)

    async def token_count(self, incoming: AgentRequest) -> dict[str, Any]:
        """The tokens of a request's prompt, as the chat template writes it. Raises
        RequestRejected.
        """
        count = await self._calls.count_prompt_tokens(incoming)
        return {"object": "response.input_tokens", "input_tokens": count}

    def _model_names(self, env: str) -> list[str]:
        client = self._clients[self._run.envs[env].pool]
        pool = client.registry.pool
        servers = client.servers().values()
        return sorted({server.model for server in servers if server.pool == pool})


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "streamrl",
        "type": "model",
        "display_name": name,
        "created_at": CREATED,
    }
