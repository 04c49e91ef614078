"""The page over HTTP: what `views.py` makes of the state, as JSON; changes as server-sent events;
the files of `page/`.

There is no login. It listens on loopback, answers only to the names of its own address (a web site
that points its name at 127.0.0.1 gets nothing), and only reads. What comes from a rollout is text
to the page: the browser itself refuses scripts from elsewhere, and HTML made of text.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import uvicorn
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamrl.config.checks import is_loopback
from streamrl.config.run_file import RunFile
from streamrl.dashboard import views
from streamrl.dashboard.index import FATES, Query, RolloutLocation, Sort
from streamrl.dashboard.reading import LiveState, batch_at, follow, rollout_at
from streamrl.dashboard.state import new
from streamrl.dashboard.tokens import texts_of
from streamrl.errors import ConfigError, PortTaken, StreamrlError
from streamrl.log.protocol import Log

PAGE = Path(__file__).parent / "page"
PORT = 8650
TICK_S = 1.0  # between two looks for changes
STREAMS = 64  # pages that are told of changes at a time
IDLE_S = 5.0  # how old the ages on the page may get while nothing happens
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
NUMBERS = {
    "batch": int,
    "version_min": int,
    "version_max": int,
    "reward_min": float,
    "reward_max": float,
}


class RequestRefused(Exception):
    """A request that cannot be answered: the status and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


# ---- serving -------------------------------------------------------------------------------------


def say_at_once(url: str) -> None:
    print(url, flush=True)  # whoever reads a pipe waits for it


def serve(
    run: RunFile,
    logs: Callable[[], AbstractContextManager[Log | None]],
    stop: threading.Event,
    host: str = "127.0.0.1",
    port: int = PORT,
    public: bool = False,
    gone: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = say_at_once,
) -> None:
    """Follow the run and serve its page until `stop` is set.

    `logs` opens the run's log, again when it is `gone`; None: `stop` came first. Raises ConfigError
    for an address that others reach, unless `public`; PortTaken.
    """
    check_host(host, public)
    board = LiveState(new(run))
    with listening(host, port) as listener:
        at = listener.getsockname()
        config = uvicorn.Config(
            app(board, hosts(host, public), stop),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        # not this thread: signals stay its own
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
        thread.start()
        try:
            say(f"http://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{at[1]}/")
            while not stop.is_set():
                with logs() as log:
                    if log is not None:
                        follow(board, log, stop, gone)
        finally:
            stop.set()  # the event streams end
            server.should_exit = True
            thread.join()


def hosts(host: str, public: bool) -> list[str]:
    """The names that are answered to."""
    return ["*"] if public else ["127.0.0.1", "localhost", "[::1]", "::1", host]


def check_host(host: str, public: bool) -> None:
    """Raises ConfigError for an address that other machines reach, unless that is wanted."""
    if not is_loopback(host) and not public:
        raise ConfigError(
            f"--host {host}: other machines would reach the page, and it has no login; forward the"
            f" port instead (`ssh -L {PORT}:127.0.0.1:{PORT} ...`), or say --public behind"
            " something that asks who is there"
        )


def listening(host: str, port: int) -> socket.socket:
    """A socket there. Raises PortTaken, ConfigError."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except socket.gaierror:
        raise ConfigError(f"--host {host}: no such address") from None
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise PortTaken(
            f"{host}:{port} cannot be listened on ({why}); give another --port, or 0 for any"
            " free one"
        ) from None


# ---- the application -----------------------------------------------------------------------------


def app(
    board: LiveState,
    hosts: list[str],
    stop: threading.Event,
    clock: Callable[[], float] = time.time,
) -> ASGIApp:
    answers = Api(board, stop, clock)
    routes = [
        Route("/", lambda request: FileResponse(PAGE / "index.html")),
        Route("/api/overview", answers.overview),
        Route("/api/events", answers.events),
        Route("/api/rollouts", answers.rollouts),
        Route("/api/rollouts/{env}/{partition:int}/{offset:int}", answers.rollout),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    handlers: Any = {RequestRefused: refused, StreamrlError: broken}
    inner = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers=handlers,
    )
    return guarded(inner)


def guarded(inner: ASGIApp) -> ASGIApp:
    """Every answer with the headers that keep a browser from running, framing or leaking what is
    shown.
    """

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [
                    *(
                        (name, value)
                        for name, value in message["headers"]
                        if name.decode().lower() not in HEADERS
                    ),
                    *own,
                ]
            await send(message)

        await inner(scope, receive, sending)

    return outer


async def refused(request: Request, error: RequestRefused) -> Response:
    return json({"error": str(error)}, error.status)


async def broken(request: Request, error: StreamrlError) -> Response:
    return json({"error": f"the run's log cannot be read now: {error}"}, 503)


def json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Api:
    """The questions that the page asks."""

    def __init__(self, board: LiveState, stop: threading.Event, clock: Callable[[], float]) -> None:
        self._board = board
        self._stop = stop
        self._clock = clock
        self._texts = None
        self._loaded = False
        # messages folded, when, what was made of them
        self._live: tuple[int, float, bytes] = (-1, 0.0, b"")
        self._reading = threading.Lock()
        self._streams = 0

    def overview(self, request: Request) -> Response:
        step = number(request, "step", int)
        return Response(
            self._now() if step is None else self._at(step), media_type="application/json"
        )

    def rollouts(self, request: Request) -> Response:
        asked = query(request)
        step = number(request, "step", int)
        page = number(request, "page", int) or 0
        return json(views.page(self._board.state, asked, max(page, 0), step, self._board.lock))

    def rollout(self, request: Request) -> Response:
        place = RolloutLocation(
            request.path_params["env"],
            request.path_params["partition"],
            request.path_params["offset"],
        )
        step = number(request, "step", int)
        board = self._board
        state = self._board.state
        with board.lock:
            at = state.index.find(place)
            if at is None:
                raise RequestRefused(
                    404, f"no rollout is known at {place.env}[{place.partition}]@{place.offset}"
                )
            known = views.row(state, at, step)
            batch = state.batches.get(known["batch"]) if known["batch"] is not None else None
        with self._reading:  # one at a time: each has a client of the broker's for itself
            if (log := board.log) is None:
                return json(
                    {
                        **known,
                        "error": "the run's broker cannot be reached now; its tokens lie there",
                    }
                )
            found = rollout_at(log, place)
            if isinstance(found, str):
                return json({**known, "error": found})
            trained = batch_at(log, batch) if batch is not None else None
            return json({**known, **views.detail(found, trained, self._tokenizer())})

    async def events(self, request: Request) -> Response:
        if self._streams >= STREAMS:
            raise RequestRefused(503, f"{STREAMS} pages are told of changes already; close one")
        return EventSourceResponse(self._changes(), ping=15)

    async def _changes(self) -> AsyncIterator[ServerSentEvent]:
        self._streams += 1
        try:
            async for change in self._told():
                yield change
        finally:
            self._streams -= 1

    async def _told(self) -> AsyncIterator[ServerSentEvent]:
        sent = b""
        while not self._stop.is_set():
            now = await run_in_threadpool(self._now)
            if now is not sent:
                sent = now
                yield ServerSentEvent(event="overview", data=now.decode())
            for _ in range(10):
                if not self._stop.is_set():
                    await asyncio.sleep(TICK_S / 10)

    def _now(self) -> bytes:
        """The page as it is, made once for all who look."""
        with self._board.lock:
            messages, made_s, made = self._live
            time_s = self._clock()
            state = self._board.state
            if state.messages != messages or time_s - made_s > IDLE_S:
                made = msgspec.json.encode(
                    {**views.overview(state, time_s), "read": self._board.read_share}
                )
                self._live = state.messages, time_s, made
            return made

    def _at(self, step: int) -> bytes:
        with self._board.lock:
            return msgspec.json.encode(
                {
                    **views.overview(self._board.state, self._clock(), step),
                    "read": self._board.read_share,
                }
            )

    def _tokenizer(self) -> views.Texts | None:
        if not self._loaded:
            self._texts = texts_of(self._board.state.run)
            self._loaded = True
        return self._texts


def query(request: Request) -> Query:
    """The filters of a request. Raises RequestRefused."""
    given = {
        name: request.query_params.get(name, "")
        for name in ("env", "fate", "group", "text", "sort")
    }
    if given["fate"] and given["fate"] not in FATES:
        raise RequestRefused(400, f"fate {given['fate']!r} is none of {', '.join(FATES)}")
    if not given["sort"]:
        given["sort"] = "newest"
    if given["sort"] not in get_args(Sort):
        raise RequestRefused(400, f"sort {given['sort']!r} is none of {', '.join(get_args(Sort))}")
    numbers = {name: number(request, name, kind) for name, kind in NUMBERS.items()}
    return Query(**given, **numbers)  # pyright: ignore[reportArgumentType]


def number(request: Request, name: str, kind: Callable[[str], Any]) -> Any:
    """A number of a request; None where it is not given. Raises RequestRefused."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    with suppress(ValueError):
        value = kind(text)
        if abs(value) < 2**31:  # nan is not
            return value
    raise RequestRefused(400, f"{name} is {text[:40]!r}, not a number that can be")
