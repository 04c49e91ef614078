"""What the gateway adds to a model call, and how many calls it serves.

    python -m bench.gateway [--calls 200] [--sessions 32] [--seconds 10] [--replicas 2]

The replicas are `streamrl gateway`, the broker is a real one, and in place of vLLM there is a stub
that answers at once. What is added is the median of calls of one session, one after another, less
the median of the same two requests to the stub. Before anything is measured, agents ask for as long
as the rate is measured: a broker that has just started needs ten times as long for a record. Agents
ask with the client that the gateway asks servers with, since what an SDK takes is its own.

The limits are LIMIT_MS and LIMIT_CALLS_PER_S on an idle machine of two cores; the exit code is 1
beyond them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn
import yaml

from bench.measure import RESULTS, cpu_s, quantile, write
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.gateway.key_command import make_key
from streamrl.inference.clients.client import Client
from streamrl.inference.clients.server_connection import RequestFailed, ServerConnection
from streamrl.stream.local_kafka import broker, ports
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Server
from tests.support.beats import repeating

LIMIT_MS = 3.0
LIMIT_CALLS_PER_S = 300.0
ENV = "agent"
PORT = 18_700
PROMPT_TOKENS = 256
ANSWER_TOKENS = 64
WAIT_S = 60.0
QUESTION = [{"role": "user", "content": "What is 3*4?"}]


# ---- the stub ------------------------------------------------------------------------------------

RENDERED = json.dumps({"token_ids": list(range(PROMPT_TOKENS))}).encode()
CHOICE = {
    "finish_reason": "stop",
    "token_ids": list(range(ANSWER_TOKENS)),
    "weight_versions": [{"version": "1", "start": 0, "end": ANSWER_TOKENS}],
    "text": "The answer is 12.",
    "logprobs": {"content": [{"token": "?", "logprob": -0.5}] * ANSWER_TOKENS},
}
GENERATED = json.dumps({"choices": [CHOICE]}).encode()


async def stub(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that answers as vLLM does, whatever it is asked."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    body = RENDERED if scope["path"].endswith("/render") else GENERATED
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve_stub(port: int) -> None:
    uvicorn.run(stub, port=port, log_level="warning", lifespan="off")


# ---- the run -------------------------------------------------------------------------------------


def settings(directory: Path, replicas: int) -> dict[str, Any]:
    return {
        "run": "gateway",
        "runs_dir": str(directory / "runs"),
        "envs": {ENV: {"kind": "copy-digits", "max_tokens": 128, "sessions": {}}},
        "gateway": {"replicas": replicas, "port": PORT},
    }


@contextmanager
def started(command: list[str], address: str = "") -> Iterator[int]:
    """A process of ours, by its id."""
    environment = {**os.environ, "STREAMRL_KAFKA": address, "STREAMRL_LOG": "WARNING"}
    process = subprocess.Popen([sys.executable, *command], env=environment)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def announced(log: KafkaLog, server: Server) -> Iterator[None]:
    """The server of the stub gives signs of life."""
    producer = log.producer()
    beat = to_message(Output(topology.SERVERS, server.server_id, server))
    try:
        with repeating(lambda: producer.send(beat), 0.5):
            yield
    finally:
        producer.close()


async def until_up(url: str) -> None:
    deadline = time.monotonic() + WAIT_S
    async with httpx.AsyncClient() as http:
        while time.monotonic() < deadline:
            try:
                if (await http.get(url)).is_success:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit(f"bench: {url} did not come up within {WAIT_S:.0f} s")


# ---- what is measured ----------------------------------------------------------------------------


class Throughput(NamedTuple):
    calls_per_s: float
    cpu_ms_per_call: float


class Session:
    """An agent that asks the same question on and on, each time as a new conversation."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    @classmethod
    async def begin(cls, run: RunFile, url: str) -> Session:
        gateway = ServerConnection(url, make_key(run, ENV, "open", days=1))
        while True:
            try:
                answer = await gateway.post("/rl/start_session", {"task_id": "0"}, dict[str, str])
                break
            except RequestFailed:
                await asyncio.sleep(0.1)  # the gateway has not heard of the stub yet
        await gateway.close()
        return cls(ServerConnection(url, answer["api_key"]))

    async def call(self) -> None:
        body = {"model": "policy", "messages": QUESTION}
        await self._connection.post("/v1/chat/completions", body, dict[str, Any])

    async def close(self) -> None:
        await self._connection.close()


async def median_ms(call: Callable[[], Awaitable[Any]], calls: int) -> float:
    """The median of calls, one after another."""
    seconds = list[float]()
    for _ in range(calls):
        started_s = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - started_s)
    return quantile(seconds, 0.5) * 1e3


async def latency(run: RunFile, server: Server, url: str, calls: int) -> dict[str, float]:
    """Milliseconds of a call of the stub, and through the gateway."""
    client = Client()
    client.on_server(server.server_id, server)
    direct = await median_ms(lambda: client.sample(QUESTION, 1, run.envs[ENV]), calls)
    await client.close()
    session = await Session.begin(run, url)
    through = await median_ms(session.call, calls)
    await session.close()
    return {"direct_ms": direct, "through_ms": through, "added_ms": through - direct}


async def throughput(
    run: RunFile, urls: list[str], replicas: list[int], sessions: int, s: float
) -> Throughput:
    """The rate of calls when so many sessions ask for so many seconds."""
    asking = [await Session.begin(run, urls[i % len(urls)]) for i in range(sessions)]
    until_s = time.perf_counter() + s
    used_s = sum(map(cpu_s, replicas))

    async def work(session: Session) -> int:
        calls = 0
        while time.perf_counter() < until_s:
            await session.call()
            calls += 1
        await session.close()
        return calls

    started_s = time.perf_counter()
    calls = sum(await asyncio.gather(*map(work, asking)))
    rate = calls / (time.perf_counter() - started_s)
    used_s = sum(map(cpu_s, replicas)) - used_s
    return Throughput(rate, used_s / calls * 1e3)


async def measure(
    run: RunFile, server: Server, replicas: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    urls = [f"http://127.0.0.1:{PORT + i}" for i in range(options.replicas)]
    for url in urls:
        await until_up(f"{url}/health")
    await throughput(run, urls, replicas, options.sessions, options.seconds)  # until all are warm
    measured = await throughput(run, urls, replicas, options.sessions, options.seconds)
    added = await latency(run, server, urls[0], options.calls)
    return {**added, **measured._asdict()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the gateway adds to a model call.")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        serve_stub(options.stub)
        return
    with (
        tempfile.TemporaryDirectory() as name,
        broker.ensure_running(Path(name) / "kafka") as address,
    ):
        path = Path(name) / "run.yaml"
        path.write_text(yaml.safe_dump(settings(Path(name), options.replicas)))
        run = run_file.load(path)
        topic_changes.apply(run, {"bootstrap.servers": address})
        port = ports.free_port()
        server = Server(server_id="inference-0", url=f"http://127.0.0.1:{port}", state="ready")
        log = KafkaLog({"bootstrap.servers": address}, run.run)
        command = ["-m", "streamrl.cli", "gateway", str(path), "--index"]
        with ExitStack() as stack:
            stack.enter_context(started(["-m", "bench.gateway", "--stub", str(port)]))
            stack.enter_context(announced(log, server))
            replicas = [
                stack.enter_context(started([*command, str(i)], address))
                for i in range(options.replicas)
            ]
            measured = asyncio.run(measure(run, server, replicas, options))
    print(json.dumps(measured, indent=1))
    write(RESULTS / "gateway.json", measured)
    is_slow = measured["added_ms"] > LIMIT_MS or measured["calls_per_s"] < LIMIT_CALLS_PER_S
    sys.exit(1 if is_slow else 0)


if __name__ == "__main__":
    main()
