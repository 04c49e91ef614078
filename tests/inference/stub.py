"""A vLLM of a few lines for unit tests: answers the routes that the client and the engine use, and
can be told to misbehave.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from streamrl.stream.records import Server

TOO_LONG = (
    "This model's maximum context length is 64 tokens. However, your prompt contains at least 65"
    " input tokens"
)

METRICS = """vllm:num_requests_running{engine="0"} 5.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:generation_tokens_total{engine="0"} 77.0
"""


class Stub(ThreadingHTTPServer):
    """`mode`: ok, broken (500), refuse (400), abort (a choice that was cut off), unlabelled
    (no version), held (no answer before `kill`, and none then: its connections end). `asked`: every
    (path, body).

    `key`: without it nobody is answered. `spans`: versions of the first token of each answer, and
    of the rest.
    """

    daemon_threads = True

    def __init__(self, name: str, mode: str = "ok", version: str = "3", key: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.mode = mode
        self.version = version
        self.reset_succeeds = True
        self.admits_probes = True  # while it is paused
        self.key, self.spans, self.killed = key, ("2", "3"), threading.Event()
        # what messages come to, and what tokens say
        self.rendered, self.texts = [1, 4, 10, 13, 17, 5], dict[tuple[int, ...], str]()
        self.asked: list[tuple[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Stub:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that have been killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def kill(self) -> None:
        """It answers nobody any more; whoever waits for an answer sees the end of its
        connection.
        """
        self.mode = "held"
        self.killed.set()

    def record(self, **changes: Any) -> Server:
        return Server(
            **{
                "server_id": self.name,
                "url": self.url,
                "state": "ready",
                "version": 3,
                "heartbeat_s": time.time(),
                **changes,
            }
        )

    def metrics(self) -> str:
        return METRICS

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        match path.partition("?")[0]:
            case "/v1/chat/completions/render":
                return 200, {"token_ids": self.rendered, "sampling_params": {}}
            case "/detokenize":
                return 200, {"prompt": self.texts[tuple(body["tokens"])]}
            case "/inference/v1/generate" if "prompt_logprobs" in body["sampling_params"]:
                return 200, {
                    "prompt_logprobs": [
                        None,
                        *({str(t): {"logprob": -t / 8}} for t in body["token_ids"][1:]),
                    ]
                }
            case "/inference/v1/generate":
                return 200, {
                    "choices": [self.choice(i) for i in range(body["sampling_params"]["n"])]
                }
            case "/streamrl/usage":
                return 200, {
                    "spent": {"asked_s": 4.5, "paused_s": 0.5, "idle_s": 1.0},
                    "requests": {"own": 3, "second": 1},
                    "answers": {"own": 24, "second": 8},
                }
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/streamrl/admit-probes":
                return 200, {"admitted": self.admits_probes}
            case "/reset_prefix_cache":
                return 200, {"success": self.reset_succeeds}
            case _:
                return 200, {}

    def choice(self, index: int) -> dict[str, Any]:
        first, rest = self.spans
        spans = (
            None
            if self.mode == "unlabelled"
            else [{"version": first, "start": 0, "end": 1}, {"version": rest, "start": 1, "end": 3}]
        )
        return {
            "index": index,
            "finish_reason": "abort" if self.mode == "abort" else "stop",
            "token_ids": [10, 13, 2],
            "weight_versions": spans,
            "text": "47",
            "logprobs": {
                "content": [{"token": "?", "logprob": value} for value in (-0.5, -0.25, -2.0)]
            },
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        if not self._knows():
            return
        self.server.asked.append((self.path, body))
        match self.server.mode:
            case "held":
                self.server.killed.wait()
                self.close_connection = True
            case "broken":
                self._send(500, {"error": {"message": "EngineCore encountered an issue"}})
            case "refuse":
                self._send(400, {"error": {"message": TOO_LONG, "code": 400}})
            case _:
                self._send(*self.server.answer(self.path, body))

    def do_GET(self) -> None:
        if self._knows():
            self._answer()

    def _knows(self) -> bool:
        """Answers whoever does not send the key itself."""
        known = (
            not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}"
        )
        if not known:
            self._send(
                401,
                {
                    "error": {
                        "message": "this server answers those only who send its API key",
                        "code": 401,
                    }
                },
            )
        return known

    def _answer(self) -> None:
        self._send(
            *(
                (200, self.server.metrics())
                if self.path == "/metrics"
                else self.server.answer(self.path, None)
            )
        )

    def _send(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...
