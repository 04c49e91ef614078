"""Serves the page over HTTP: the files of `page/`, the state as JSON (`views.py`,
`rollout_views.py`), and changes as server-sent events.

There is no login. The server listens on loopback and only reads. It answers only requests to the
names of its address, so a web site whose name points at 127.0.0.1 gets nothing. What comes from
a rollout is only ever text: by the headers of each answer the browser refuses scripts from
elsewhere, and HTML that is made of text.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import msgspec
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

from streamrl.config.addresses import LOOPBACK_NAMES, is_loopback
from streamrl.config.run_file import RunFile
from streamrl.extensions.dashboard import rollout_views, views
from streamrl.extensions.dashboard.index import FATES, Query, RolloutLocation, Sort
from streamrl.extensions.dashboard.reading import LiveState, batch_at, follow, rollout_at
from streamrl.extensions.dashboard.state import new
from streamrl.extensions.dashboard.tokens import texts_of
from streamrl.stream.log.protocol import Log
from streamrl.system.errors import ConfigError, StreamrlError
from streamrl.system.http_server import HttpServerThread, open_listener, url_of

PAGE = Path(__file__).parent / "page"
PORT = 8650
PORT_HINT = "give another --port, or 0 for any free one"
STOP_TIMEOUT_S = 2
TICK_S = 1.0  # Changes are looked for once in this time.
STREAMS = 64  # At most this many pages get changes at a time.
IDLE_S = 5.0  # While nothing happens, the page is made again after this time: it shows ages.
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
# The filters of a query that are numbers.
NUMBERS = {
    "batch": int,
    "version_min": int,
    "version_max": int,
    "reward_min": float,
    "reward_max": float,
}


class PageRejected(Exception):
    """A request is refused with this HTTP status, for this reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


# ---- serving -------------------------------------------------------------------------------------


def say_at_once(url: str) -> None:
    """Print the URL without buffering, because the reader of a pipe waits for it."""
    print(url, flush=True)


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

    `logs` opens the run's log, or gives None if `stop` is set first. It is opened again when it is
    `gone`. `say` gets the URL of the page.

    Raises PortTaken, and ConfigError if other machines reach `host` and the page is not `public`.
    """
    check_host(host, public)
    live = LiveState(new(run))
    application = app(live, hosts(host, public), stop)
    with (
        open_listener(host, port, "the dashboard", "--host", PORT_HINT) as listener,
        HttpServerThread(application, listener, STOP_TIMEOUT_S),
    ):
        try:
            say(f"{url_of(listener)}/")
            while not stop.is_set():
                with logs() as log:
                    if log is not None:
                        follow(live, log, stop, gone)
        finally:
            stop.set()  # This ends the event streams.


def hosts(host: str, public: bool) -> list[str]:
    """The values of a request's Host header that are answered."""
    return ["*"] if public else [*LOOPBACK_NAMES, host]


def check_host(host: str, public: bool) -> None:
    """Check that other machines do not reach this address, unless the page is `public`. Raises
    ConfigError.
    """
    if not is_loopback(host) and not public:
        raise ConfigError(
            f"--host {host}: other machines would reach the page, and it has no login; forward the"
            f" port instead (`ssh -L {PORT}:127.0.0.1:{PORT} ...`), or give --public and put a"
            " proxy with a login in front of it"
        )


# ---- the application -----------------------------------------------------------------------------


def app(
    live: LiveState,
    hosts: list[str],
    stop: threading.Event,
    clock: Callable[[], float] = time.time,
) -> ASGIApp:
    """The web application. `hosts`: see `hosts`; `clock`: the time now, in seconds."""
    answers = Api(live, stop, clock)
    routes = [
        Route("/", lambda request: FileResponse(PAGE / "index.html")),
        Route("/api/overview", answers.overview),
        Route("/api/events", answers.events),
        Route("/api/rollouts", answers.rollouts),
        Route("/api/rollouts/{env}/{partition:int}/{offset:int}", answers.rollout),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    handlers: Any = {PageRejected: rejected, StreamrlError: broken}
    inner = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers=handlers,
    )
    return guarded(inner)


def guarded(inner: ASGIApp) -> ASGIApp:
    """The application with HEADERS in every answer. They keep a browser from running, framing or
    leaking what is shown.
    """
    own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [
                    (name, value)
                    for name, value in message["headers"]
                    if name.decode().lower() not in HEADERS
                ]
                message["headers"] = [*others, *own]
            await send(message)

        await inner(scope, receive, send_guarded)

    return outer


async def rejected(request: Request, error: PageRejected) -> Response:
    """The answer to a request that is refused."""
    return json({"error": str(error)}, error.status)


async def broken(request: Request, error: StreamrlError) -> Response:
    """The answer to a request that needs the log while it cannot be read."""
    return json({"error": f"the run's log cannot be read now: {error}"}, 503)


def json(value: Any, status: int = 200) -> Response:
    """An answer of plain values."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Api:
    """Answers the requests of the page."""

    def __init__(self, live: LiveState, stop: threading.Event, clock: Callable[[], float]) -> None:
        self._live = live
        self._stop = stop
        self._clock = clock
        self._tokenizer_loaded = False
        self._texts: rollout_views.Texts | None = None
        self._latest = _Overview(-1, 0.0, b"")
        self._reading = threading.Lock()
        self._streams = 0

    def overview(self, request: Request) -> Response:
        """Everything but the rollouts, at a step or now."""
        step = number(request, "step", int)
        overview = self._overview_now() if step is None else self._overview_at(step)
        return Response(overview, media_type="application/json")

    def rollouts(self, request: Request) -> Response:
        """A page of the rollouts that match a query."""
        asked = query(request)
        step = number(request, "step", int)
        page = number(request, "page", int) or 0
        return json(
            rollout_views.page(self._live.state, asked, max(page, 0), step, self._live.lock)
        )

    def rollout(self, request: Request) -> Response:
        """One rollout with its tokens, or with the reason why they cannot be read."""
        params = request.path_params
        place = RolloutLocation(params["env"], params["partition"], params["offset"])
        step = number(request, "step", int)
        live = self._live
        state = self._live.state
        with live.lock:
            at = state.index.find(place)
            if at is None:
                raise PageRejected(
                    404, f"no rollout is known at {place.env}[{place.partition}]@{place.offset}"
                )
            known = rollout_views.row(state, at, step)
            batch = state.batches.get(known["batch"]) if known["batch"] is not None else None
        # Each read opens a Kafka client, so there is only one at a time.
        with self._reading:
            log = live.log
            if log is None:
                why = "the run's broker cannot be reached now; the tokens are in it"
                return json({**known, "error": why})
            result = rollout_at(log, place)
            if isinstance(result, str):
                return json({**known, "error": result})
            trained = batch_at(log, batch) if batch is not None else None
            return json({**known, **rollout_views.detail(result, trained, self._tokenizer())})

    async def events(self, request: Request) -> Response:
        """The overview, again and again when it has changed."""
        if self._streams >= STREAMS:
            raise PageRejected(503, f"{STREAMS} pages are told of changes already; close one")
        return EventSourceResponse(self._changes(), ping=15)

    async def _changes(self) -> AsyncIterator[ServerSentEvent]:
        self._streams += 1
        sent = b""
        try:
            while not self._stop.is_set():
                now = await run_in_threadpool(self._overview_now)
                if now is not sent:
                    sent = now
                    yield ServerSentEvent(event="overview", data=now.decode())
                # The stream ends soon after `stop`, so it looks more often than once in TICK_S.
                for _ in range(10):
                    if not self._stop.is_set():
                        await asyncio.sleep(TICK_S / 10)
        finally:
            self._streams -= 1

    def _overview_now(self) -> bytes:
        """The overview as it is now. It is made once for all pages."""
        with self._live.lock:
            time_s = self._clock()
            messages = self._live.state.messages
            if messages != self._latest.messages or time_s - self._latest.made_s > IDLE_S:
                self._latest = _Overview(messages, time_s, self._overview(time_s))
            return self._latest.json

    def _overview_at(self, step: int) -> bytes:
        """The overview at the end of `step`."""
        with self._live.lock:
            return self._overview(self._clock(), step)

    def _overview(self, time_s: float, step: int | None = None) -> bytes:
        overview = views.overview(self._live.state, time_s, step)
        return msgspec.json.encode({**overview, "read": self._live.read_share})

    def _tokenizer(self) -> rollout_views.Texts | None:
        if not self._tokenizer_loaded:
            self._texts = texts_of(self._live.state.run)
            self._tokenizer_loaded = True
        return self._texts


class _Overview(NamedTuple):
    """The overview that was made last."""

    messages: int  # the number of messages that had been folded
    made_s: float  # when it was made
    json: bytes


def query(request: Request) -> Query:
    """The filters and the order that a request asks for. Raises PageRejected."""
    asked = {name: request.query_params.get(name, "") for name in ("env", "fate", "group", "text")}
    if asked["fate"] and asked["fate"] not in FATES:
        raise PageRejected(400, f"fate {asked['fate']!r} is none of {', '.join(FATES)}")
    sort = request.query_params.get("sort", "") or "newest"
    if sort not in get_args(Sort):
        raise PageRejected(400, f"sort {sort!r} is none of {', '.join(get_args(Sort))}")
    numbers = {name: number(request, name, kind) for name, kind in NUMBERS.items()}
    return Query(**asked, sort=cast(Sort, sort), **numbers)


def number(request: Request, name: str, kind: Callable[[str], Any]) -> Any:
    """A number of a request, or None if it is not given. `kind`: int or float. Raises
    PageRejected for a text that is no number, and for numbers beyond 32 bits.
    """
    text = request.query_params.get(name, "")
    if not text:
        return None
    with suppress(ValueError):
        value = kind(text)
        if abs(value) < 2**31:  # This is false for NaN.
            return value
    raise PageRejected(400, f"{name} is {text[:40]!r}, not a number that can be")
