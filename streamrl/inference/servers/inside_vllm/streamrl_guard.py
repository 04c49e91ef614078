"""Runs inside vLLM's server as its outermost middleware: decides who may send which request, and
measures what the server's time goes to.

- Requests that control the server (pause it, load weights from a path, call a method of its
  workers, abort requests of others) are for its agent only. The agent has made up a key for this
  one server. vLLM itself would answer all who reach the port, with or without its own key.
- Sampling, and what belongs to it, is for clients that send the key of a run that is served. Each
  run has its own key, so its requests can be counted, its adapters are sampled by no other run, and
  its key can be replaced while those of other runs stay. If there are no keys, sampling is for
  everybody. No run's key gives control.
- A request to sample has text of a bounded size, and asks for a bounded number of answers
  (`request_of`, `answers_asked`). The length of an answer is bounded by vLLM's context.
- `/health` answers everybody.
- `PAUSE` pauses vLLM for its agent as soon as no step is running. (vLLM's own request then sleeps
  for 20 ms, so that clients get what was sampled.)
- `ADMIT_PROBES` lets a paused vLLM compute the probes of its agent, and nothing else.
- `USAGE` tells its agent for how long a client waited for tokens, for how long the server was
  paused, and for how long no client asked (`Clock`), and what each run asked for.

vLLM's Python does not have streamrl. So this module uses the standard library only, and is found by
PYTHONPATH: that is why it has a long name and its own directory. The keys are in the
environment, because the process list shows arguments to everybody.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = {"/health"}
SAMPLING = {
    "/v1/models",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
    "/metrics",
}
MAX_BODY_BYTES = 16 << 20  # A million tokens as JSON have about 7 MiB.
# The keys that a part of a message may have. For others vLLM fetches a URL, or decodes images and
# the like.
TEXT_KEYS = {"type", "text", "refusal", "thinking"}
NOT_TEXT = {"content_parts", "features", "prompt_embeds"}  # The keys that a request must not have.
ANSWERING = {"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"}
PAUSE = "/streamrl/pause"
ADMIT_PROBES = "/streamrl/admit-probes"
RESUME = "/resume"
USAGE = "/streamrl/usage"
REFUSED = {
    "error": {
        "message": "this server does that only for requests with the right API key; of a run that"
        " it serves, that is the run's own inference.api_key",
        "code": 401,
    }
}


class Clock:
    """What the time of a server went to, in seconds since it was made. `spent` adds up to them."""

    def __init__(self, now_s: float) -> None:
        self.spent = {"asked_s": 0.0, "paused_s": 0.0, "idle_s": 0.0}
        self.asked = 0  # the number of requests that wait for an answer
        self.paused = False
        self._since_s = now_s

    def advance(self, now_s: float, asked: int = 0, paused: bool | None = None) -> None:
        """Count the time up to `now_s`. From then on, `asked` more requests wait for an answer, and
        the server is paused or not; None: as before.
        """
        if self.paused:
            activity = "paused_s"
        elif self.asked:
            activity = "asked_s"
        else:
            activity = "idle_s"
        self.spent[activity] += now_s - self._since_s
        self.asked += asked
        if paused is not None:
            self.paused = paused
        self._since_s = now_s


class Guard:
    """ASGI middleware."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._agent = os.environ["STREAMRL_AGENT_KEY"]
        self._keys: dict[str, str] = json.loads(os.environ["STREAMRL_RUN_KEYS"])  # by run
        self._max_samples = int(os.environ["STREAMRL_MAX_SAMPLES"])
        self._clock = Clock(time.monotonic())
        self._requests = dict.fromkeys(self._keys, 0)  # to sample, by run
        self._answers = dict.fromkeys(self._keys, 0)  # that these asked for

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        from_agent = _has(sent, self._agent)
        runs = [run for run, key in self._keys.items() if _has(sent, key)]
        if from_agent or path in OPEN or (path in SAMPLING and (runs or not self._keys)):
            if from_agent and path == USAGE:
                await _answer(send, 200, self._usage())
                return
            if scope["type"] == "http" and not from_agent and path not in OPEN:
                body = await _body(receive)
                try:
                    asked = request_of(body)
                    answers = answers_asked(asked, self._max_samples)
                    self._refuse_model_of_another_run(asked, runs)
                except Objection as objection:
                    await _answer(send, 400, {"error": {"message": str(objection), "code": 400}})
                    return
                self._count(path, runs, answers)
                receive = _again(body, receive)
            with self._counted(path, from_agent):
                if from_agent and path == PAUSE:
                    await _pause(scope["app"].state.engine_client)
                    await _answer(send, 200, {})
                elif from_agent and path == ADMIT_PROBES:
                    admitted = await _admit_probes(scope["app"].state.engine_client)
                    await _answer(send, 200, {"admitted": admitted})
                else:
                    await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _answer(send, 401, REFUSED)
        else:
            await send({"type": "websocket.close", "code": 1008})

    @contextmanager
    def _counted(self, path: str, from_agent: bool) -> Generator[None]:
        """Count the time of this request. Requests of the agent itself count as no work."""
        asks = path in ANSWERING and not from_agent
        self._clock.advance(time.monotonic(), asked=asks, paused=True if path == PAUSE else None)
        try:
            yield
        finally:
            self._clock.advance(
                time.monotonic(), asked=-asks, paused=False if path == RESUME else None
            )

    def _refuse_model_of_another_run(self, asked: dict[str, Any], runs: Sequence[str]) -> None:
        """Raise Objection if a request asks for an adapter of a run whose key it does not carry.
        The name of an adapter ends with that of its run.
        """
        _, has_owner, owner = str(asked.get("model")).rpartition("@")
        if self._keys and has_owner and owner not in runs:
            raise Objection("model: an adapter is sampled with the key of its run only")

    def _count(self, path: str, runs: Sequence[str], answers: int) -> None:
        """Count a request, if it samples, for the runs whose keys it carries: one, unless a client
        has the keys of several.
        """
        for run in runs if path in ANSWERING else ():
            self._requests[run] += 1
            self._answers[run] += answers

    def _usage(self) -> dict[str, Any]:
        self._clock.advance(time.monotonic())
        return {"spent": self._clock.spent, "requests": self._requests, "answers": self._answers}


class Objection(Exception):
    """A request to sample is refused. The message has the reason."""


def request_of(body: bytes) -> dict[str, Any]:
    """The object that a request has as its body, or an empty one. Raises Objection."""
    if len(body) > MAX_BODY_BYTES:
        raise Objection(f"the request has more than {MAX_BODY_BYTES} bytes")
    if not body:
        return {}
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise Objection("the request is not JSON") from None
    if not isinstance(asked, dict):
        raise Objection("the request is not a JSON object")
    return asked


def answers_asked(asked: dict[str, Any], max_samples: int) -> int:
    """The number of answers that a request asks for. Raises Objection for too many, and for a
    request with more than text and tokens.
    """
    for name in NOT_TEXT:
        if asked.get(name):
            raise Objection(f"{name}: this server takes text and tokens only")
    if not _is_text(asked.get("messages")):
        raise Objection("messages: this server takes text only, and fetches nothing")
    prompts = _prompts(asked.get("prompt"))
    sampling = asked.get("sampling_params")
    most = prompts
    for where in (asked, sampling if isinstance(sampling, dict) else {}):
        for name in ("n", "best_of"):
            answers = where.get(name)
            if answers is not None and not isinstance(answers, int):
                raise Objection(f"{name} is not a whole number")
            most = max(most, prompts * (answers or 1))
    if most > max_samples:
        raise Objection(
            f"{most} answers in one request; at most {max_samples} are given (the largest"
            " group_size of the run, or inference.max_num_seqs)"
        )
    return most


def _prompts(prompt: Any) -> int:
    """The number of prompts: one, unless `prompt` is a list of texts or of lists of tokens."""
    if isinstance(prompt, list) and any(isinstance(one, (str, list)) for one in prompt):
        return len(prompt)
    return 1


def _is_text(messages: Any) -> bool:
    """Whether all parts of all messages are text that is in the request itself."""
    if not isinstance(messages, list):
        return True
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and not all(
            isinstance(part, str) or (isinstance(part, dict) and set(part) <= TEXT_KEYS)
            for part in content
        ):
            return False
    return True


async def _body(receive: Receive) -> bytes:
    """The body of a request. Of a body that is too large, only somewhat more than the limit."""
    body = bytearray()
    while len(body) <= MAX_BODY_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body, which has been read already, and then what follows it."""
    left = [body]

    async def received() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return received


async def _pause(engine: Any) -> None:
    """Do what `pause_generation(mode="keep")` of vLLM's AsyncLLM does before it sleeps: requests
    stay, and nothing is sampled.
    """
    await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)


async def _admit_probes(engine: Any) -> bool:
    """Let a paused vLLM, in which nothing runs, compute what `streamrl_probing.py` puts first.
    Returns whether this vLLM can. If not, it stays paused altogether.
    """
    # vLLM has loaded it as a plugin, under this name.
    import streamrl_probing  # pyright: ignore[reportMissingImports]

    if not streamrl_probing.admitted:
        return False
    await engine.engine_core.pause_scheduler_async(mode="wait", clear_cache=False)
    return True


async def _answer(send: Send, status: int, body: Any) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json")],
        }
    )
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _has(sent: list[bytes], key: str) -> bool:
    return bool(key) and any(
        hmac.compare_digest(value, b"Bearer " + key.encode()) for value in sent
    )
