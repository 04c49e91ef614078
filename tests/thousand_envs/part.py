"""The two ends of the run, each a process: `python -m tests.thousand_envs.part RUN.yaml NAME`, with
a
NAME of `PARTS`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import httptools

from streamrl.cli.shared import open_log, stop_on_signals
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.log.records_of import record_in
from streamrl.stream.records import PolicyVersion, Server
from streamrl.system.errors import BrokerError, StreamrlError, TransactionFailed
from tests.chaos import learner
from tests.support.sampling_stub import rendered, text_of

NAME = topology.inference_part(topology.GENERATION, 0)
ANSWER_S = 0.1  # that a request for tokens takes
HEARTBEAT_S = 0.5
COUNTS = "counts.json"  # in the directory of the run
END = 256  # the token


class Sampler:
    """What a server knows, whatever the connection: its version, and what it was asked."""

    version = -1
    requests = 0
    answers = 0

    def answer(self, path: str, body: Any) -> Any:
        self.requests += 1
        if path.startswith("/v1/chat/completions/render"):
            return {"token_ids": rendered(body["messages"], [])}
        count = body["sampling_params"]["n"]
        self.answers += count
        prompt = text_of(body["token_ids"])
        return {"choices": [self.choice(prompt, index) for index in range(count)]}

    def choice(self, prompt: str, index: int) -> dict[str, Any]:
        """The digits that are to be copied, or others."""
        right = Random(f"{prompt} {index}").random() < 0.5
        text = prompt.partition(">")[2].partition("=")[0] if right else "--"
        tokens = [*text.encode(), END]
        span = {"version": str(self.version), "start": 0, "end": len(tokens)}
        return {
            "finish_reason": "stop",
            "token_ids": tokens,
            "weight_versions": [span],
            "text": text,
            "logprobs": {"content": [{"logprob": -token / 512} for token in tokens]},
        }


class Connection(asyncio.Protocol):
    """A client of the server, one request at a time."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.parser = httptools.HttpRequestParser(self)
        self.path = ""
        self.body = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path = url.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        answer = self.sampler.answer(self.path, json.loads(self.body))
        self.body.clear()
        content = json.dumps(answer).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        wait_s = ANSWER_S if "choices" in answer else 0.0
        asyncio.get_running_loop().call_later(wait_s, self.transport.write, head + content)


def serve(run: RunFile, log: Log, stop: threading.Event) -> None:
    """Be a server of the run until `stop` is set."""
    asyncio.run(_serve(run, log, stop))


async def _serve(run: RunFile, log: Log, stop: threading.Event) -> None:
    sampler = Sampler()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(sampler), "127.0.0.1", 0, backlog=1_024)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.to_thread(register, run, log, stop, sampler, url)
    server.close()


def register(run: RunFile, log: Log, stop: threading.Event, sampler: Sampler, url: str) -> None:
    """Follow the newest version, and be known by it."""
    reader = log.reader({topology.POLICY_VERSIONS_PARTITION: 0})
    producer = log.producer()
    while not stop.is_set():
        heard_s = time.monotonic()
        while (left_s := heard_s + HEARTBEAT_S - time.monotonic()) > 0 and not stop.is_set():
            for message in reader.poll(100, min(left_s, 0.1)):
                version = record_in(message, PolicyVersion)
                sampler.version = version.version if version else sampler.version
        state = "ready" if sampler.version >= 0 else "starting"
        record = Server(
            server_id=NAME,
            url=url,
            version=sampler.version,
            state=state,
            heartbeat_s=time.time(),
        )
        producer.send(to_message(Output(topology.SERVERS, NAME, record)))
        counts = {"requests": sampler.requests, "answers": sampler.answers}
        write_whole(run.directory / COUNTS, json.dumps(counts))
    producer.close()
    reader.close()


def write_whole(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def train(run: RunFile, log: Log, stop: threading.Event) -> None:
    """Be the learner, and begin again after a transaction that failed, as `up` would have it."""
    while not stop.is_set():
        try:
            learner.main(run, log, stop)
        except (BrokerError, TransactionFailed) as error:
            print(error, file=sys.stderr)


PARTS = {"server": serve, "learner": train}

if __name__ == "__main__":
    file, name = sys.argv[1:]
    loaded = run_file.load(file)
    try:
        with stop_on_signals() as (stopped, _), open_log(loaded, name) as own_log:
            PARTS[name](loaded, own_log, stopped)
    except StreamrlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
