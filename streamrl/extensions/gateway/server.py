"""The gateway's HTTP API: routes, keys, and errors in the shape of the API that was called."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from streamrl.config.addresses import LOOPBACK_NAMES, is_loopback
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import EnvSettings
from streamrl.envs.sessions.keys import (
    SESSION_FIELD,
    Key,
    KeyRefused,
    Right,
    RunKeys,
    SessionName,
    session_in_metadata,
)
from streamrl.envs.sessions.settings import Gateway
from streamrl.extensions.gateway import anthropic_messages, openai_chat, openai_responses, token_ids
from streamrl.extensions.gateway.bodies import BodyReader, ReceivedBody
from streamrl.extensions.gateway.calls import AgentRequest, ModelCallHandler
from streamrl.extensions.gateway.fields import FIELDS, left_out_header
from streamrl.extensions.gateway.lookups import LookupsApi
from streamrl.extensions.gateway.requests import Dialect, RequestRejected, openai_error, rejection
from streamrl.extensions.gateway.sessions_api import SessionsApi
from streamrl.inference.clients.client import Client
from streamrl.system.errors import StreamrlError, describe_error
from streamrl.system.offloading import Offloader
from streamrl.system.text import printable

logger = logging.getLogger(__name__)

# Paths of the calls, and the APIs that they speak.
DIALECTS: dict[str, Dialect] = {
    dialect.path: dialect
    for dialect in (
        openai_chat.DIALECT,
        openai_responses.DIALECT,
        anthropic_messages.DIALECT,
        token_ids.DIALECT,
    )
}
# Paths at which a request is counted instead of answered.
COUNTS: dict[str, Dialect] = {
    f"{anthropic_messages.PATH}/count_tokens": anthropic_messages.DIALECT,
    f"{openai_responses.PATH}/input_tokens": openai_responses.DIALECT,
}
# What a request needs, by the right of its key.
WANTED: dict[Right, str] = {
    "open": "a key that opens sessions of the env: `streamrl gateway-key RUN ENV` prints one",
    "sample": "the api_key that /rl/start_session returned",
    "grade": "the grading_key that /rl/start_session returned",
}
# With `false` the answer is left out of training.
TRAIN_HEADER = "x-streamrl-train"
Handler = Callable[[Request], Awaitable[Response]]


class HttpApi:
    """The routes of one replica."""

    def __init__(
        self,
        run: RunFile,
        keys: RunKeys,
        calls: ModelCallHandler,
        sessions: SessionsApi,
        clients: Mapping[str, Client],
        offloader: Offloader,
    ) -> None:
        self._run = run
        self._keys = keys
        self._calls = calls
        self._sessions = sessions
        self._offloader = offloader
        self._lookups = LookupsApi(run, calls, clients, offloader)
        self._bodies = BodyReader(run, offloader)

    def app(
        self, lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None
    ) -> Starlette:
        """The application. On loopback it answers to names of this machine only, so that a web site
        that points its name at 127.0.0.1 gets nothing.
        """
        routes = [
            Route(path, self._guarded(self._call(dialect), dialect), methods=["POST"])
            for path, dialect in DIALECTS.items()
        ]
        routes += [
            Route(path, self._guarded(self._count(dialect), dialect), methods=["POST"])
            for path, dialect in COUNTS.items()
        ]
        for path, handler in (
            ("/rl/start_session", self._start_session),
            ("/rl/set_reward", self._set_reward),
            ("/rl/end_session", self._end_session),
            ("/rl/end_sessions", self._end_sessions),
        ):
            routes.append(Route(path, self._guarded(handler), methods=["POST"]))
        for path, handler in (
            ("/v1/models", self._models),
            ("/v1/models/{model:path}", self._model),
            ("/v1/responses/{response}", self._response),
            ("/v1/responses/{response}/input_items", self._input_items),
        ):
            routes.append(Route(path, self._guarded(handler)))
        routes.append(Route("/health", self._health))
        host = self._run.settings_of(Gateway).host
        hosts = [*LOOPBACK_NAMES, host] if is_loopback(host) else ["*"]
        guard = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
        return Starlette(
            routes=routes,
            middleware=[guard],
            exception_handlers={404: self._unknown_path, 405: self._unknown_path},
            lifespan=lifespan,
        )

    def _guarded(self, handler: Handler, dialect: Dialect | None = None) -> Handler:
        """The handler, with every error in the shape of the API that was called."""

        async def guarded(request: Request) -> Response:
            shape = dialect.error if dialect else error_shape(request)
            try:
                return await handler(request)
            except RequestRejected as error:
                rejected = error
            except StreamrlError as error:
                logger.warning("%s: %s", request.url.path, describe_error(error))
                rejected = RequestRejected(
                    status=503,
                    why=f"the log cannot be reached: {error}",
                    field="",
                    code="",
                    retry_after_s=1,
                )
            except ClientDisconnect:
                rejected = RequestRejected(400, "the body ended too early")
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                at = f"{place.filename}:{place.lineno}"
                logger.error("%s at %s: %s", request.url.path, at, describe_error(error))
                rejected = RequestRejected(500, "the gateway failed; see its log")
            self._calls.counts["refused"] += 1
            headers = {}
            if rejected.retry_after_s:
                headers["retry-after"] = str(rejected.retry_after_s)
            return json_response(shape(rejected), rejected.status, headers)

        return guarded

    def _call(self, dialect: Dialect) -> Handler:
        """A model call in this API."""

        async def call(request: Request) -> Response:
            name, received = await self._named_call(request, dialect)
            body = received.fields
            is_stream = body.get("stream") or False
            if not isinstance(is_stream, bool):
                raise rejection("stream", "it is true or false")
            for field in ("messages", "input"):
                if isinstance(body.get(field), list):
                    self._calls.check_message_count(name.env, len(body[field]))
            incoming = AgentRequest(
                session=name,
                parse=lambda tree: dialect.parse(body, tree),
                size=received.size,
                idempotency_key=request.headers.get("idempotency-key", "")[:1_000],
                is_retry=is_retry(request),
                is_gone=request.is_disconnected,
                is_trained=is_trained(request),
            )
            answer = await self._calls.answer(incoming)
            headers = sampling_header(self._run.envs[name.env]) | left_out_header(received.left_out)

            def written() -> Response:
                response = dialect.response(body, answer)
                if not is_stream:
                    return json_response(response, 200, headers)
                events = b"".join(map(event_bytes, dialect.events(body, response)))
                return Response(events, 200, headers, "text/event-stream")

            return await self._offloader.run(str(name), answer.size, written)

        return call

    async def _start_session(self, request: Request) -> Response:
        key = self._key_of(request, "open")
        received = await self._bodies.read(request, key.env)
        url = self._run.settings_of(Gateway).url.rstrip("/") or str(request.base_url).rstrip("/")
        return json_response(
            await self._sessions.start(key.env, received.fields, url, is_retry(request))
        )

    async def _set_reward(self, request: Request) -> Response:
        key = self._key_of(request, "grade")
        name = SessionName(key.env, key.session)
        received = await self._bodies.read(request, str(name))
        return json_response(await self._sessions.set_reward(name, received.fields))

    async def _end_session(self, request: Request) -> Response:
        key = self._key_of(request, "grade")
        name = SessionName(key.env, key.session)
        received = await self._bodies.read(request, str(name))
        return json_response(await self._sessions.end(name, received.fields))

    async def _end_sessions(self, request: Request) -> Response:
        key = self._key_of(request, "open")
        received = await self._bodies.read(request, key.env)
        ended = await self._sessions.end_sessions_of_server(key.env, received.fields)
        return json_response(ended)

    def _count(self, dialect: Dialect) -> Handler:
        """How many tokens a call in this API would have as its prompt."""

        async def count(request: Request) -> Response:
            name, received = await self._named_call(request, dialect)
            incoming = AgentRequest(
                session=name,
                parse=lambda tree: dialect.parse(received.fields, tree),
                size=received.size,
            )
            counted = await self._lookups.token_count(incoming)
            return json_response(counted, 200, left_out_header(received.left_out))

        return count

    async def _models(self, request: Request) -> Response:
        return json_response(self._lookups.models(self._key_of(request, "sample").env))

    async def _model(self, request: Request) -> Response:
        env = self._key_of(request, "sample").env
        return json_response(self._lookups.model(env, request.path_params["model"]))

    async def _response(self, request: Request) -> Response:
        name = self._session_of(request)
        return json_response(await self._lookups.response(name, request.path_params["response"]))

    async def _input_items(self, request: Request) -> Response:
        name = self._session_of(request)
        response = request.path_params["response"]
        items = await self._lookups.input_items(name, response)
        return Response(items, media_type="application/json")

    async def _unknown_path(self, request: Request, error: Exception) -> Response:
        """The error of a path or method that no route has."""
        path = printable(request.url.path, 200)
        rejected = RequestRejected(
            404,
            f"the gateway does not answer {request.method} {path}; calls are POST"
            f" {', '.join(DIALECTS)}",
        )
        return json_response(error_shape(request)(rejected), rejected.status)

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    def _key_of(self, request: Request, right: Right) -> Key:
        """The key of a request, if it has this right. Raises RequestRejected."""
        try:
            key = self._keys.check(key_text(request), time.time())
        except KeyRefused as error:
            raise unauthorized(f"{error}; give {WANTED[right]}") from None
        if key.env not in self._run.session_envs:
            raise unauthorized(f"it is for env {key.env}, which has no sessions")
        if key.right != right:
            raise RequestRejected(
                403,
                f"this key is for something else ({key.right}); give {WANTED[right]}",
                code="permission_denied",
            )
        return key

    def _session_of(self, request: Request) -> SessionName:
        """The session of a request's key, if it samples in one. Raises RequestRejected."""
        key = self._key_of(request, "sample")
        if not key.session:
            raise RequestRejected(
                403,
                f"this key is for all sessions of {key.env}: give that of a session",
                code="permission_denied",
            )
        return SessionName(key.env, key.session)

    async def _named_call(
        self, request: Request, dialect: Dialect
    ) -> tuple[SessionName, ReceivedBody]:
        """The session and the body of a call. A client that has one key for all sessions of an env
        names the session in the body. Raises RequestRejected.
        """
        key = self._key_of(request, "sample")
        of_key = SessionName(key.env, key.session)
        received = await self._bodies.read(request, str(of_key), FIELDS[dialect.path])
        if of_key.session:
            return of_key, received
        name = session_in_metadata(received.fields.get("metadata"))
        if name is None or name.env != key.env:
            raise RequestRejected(
                403,
                f"this key is for all sessions of {key.env}: name one in metadata.{SESSION_FIELD},"
                f" as {key.env}.SESSION_ID",
                code="permission_denied",
            )
        return name, received


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def event_bytes(event: tuple[str, Any]) -> bytes:
    """A server-sent event."""
    name, data = event
    head = f"event: {name}\n" if name else ""
    text = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
    return head.encode() + b"data: " + text + b"\n\n"


def key_text(request: Request) -> str:
    """The API key of a request: a bearer token, or Anthropic's header."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key", "")


def unauthorized(cause: str) -> RequestRejected:
    why = f"the key is refused: {cause}; send it as Authorization: Bearer or x-api-key"
    return RequestRejected(401, why, code="invalid_api_key")


def error_shape(request: Request) -> Callable[[RequestRejected], dict[str, Any]]:
    """How the API that the client speaks writes an error, at a path that several APIs have."""
    is_anthropic = "anthropic-version" in request.headers or request.url.path.startswith(
        anthropic_messages.PATH
    )
    return anthropic_messages.error if is_anthropic else openai_error


def is_trained(request: Request) -> bool:
    """Whether the answer may be trained on. Raises RequestRejected for another word."""
    word = request.headers.get(TRAIN_HEADER, "true").lower()
    if word not in ("true", "false"):
        raise rejection(TRAIN_HEADER, "this header is true or false")
    return word == "true"


def is_retry(request: Request) -> bool:
    """SDKs of OpenAI and Anthropic count how often they have sent a request."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and bool(count.strip("0"))


def sampling_header(env: EnvSettings) -> dict[str, str]:
    """The settings that the answer was sampled with, whatever the request asked for."""
    settings = f"temperature={env.temperature:g}, top_p=1, top_k=-1"
    return {"x-streamrl-sampling": settings}
