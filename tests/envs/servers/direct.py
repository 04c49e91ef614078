"""Runs tasks of a taskset by the library itself, without streamrl, and prints the reward of each.

    python direct.py TASKSET FIRST LAST

Its model is an HTTP server of this process, which says what `answers.py` says.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from answers import said
from verifiers.v1 import EvalClientConfig, ModelContext, load_environment, resolve_env_config


class Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = [each["content"] for each in body["messages"] if each["role"] == "user"]
        message = {"role": "assistant", "content": said(asked[0], len(asked))}
        answer = {
            "id": "a",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


async def rewards(url: str, taskset: str, first: int, last: int) -> dict[int, float]:
    config = resolve_env_config(
        {"taskset": {"id": taskset}, "agent": {"runtime": {"type": "subprocess"}}}
    )
    env = load_environment(config)
    client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="none")
    context = ModelContext(model="policy", client=client)
    found = dict[int, float]()
    async with env.serving():
        for task in list(env.taskset)[first:last]:
            (slot,) = env.slots(task)
            episode = await env.run_slot(slot, context)
            (trace,) = episode.traces
            assert episode.ok, trace.errors
            found[task.data.idx] = trace.reward
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.path.insert(0, str(path.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    tasks = [int(number) for number in sys.argv[2:]]
    print(json.dumps(asyncio.run(rewards(address, path.stem, *tasks))))
