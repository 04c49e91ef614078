"""A run whose servers and learner are stand-ins that take their time asleep. Envs, buffer and
batcher are real. All are threads, on a log in memory, so that several runs fit on a machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import httptools

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs import process as envs
from streamrl.learner.inputs import follow_batches_until
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.log.records_of import record_in
from streamrl.stream.log.topics import plan
from streamrl.stream.records import Metric, PolicyVersion, Server
from tests.support.sampling_stub import END, rendered, text_of

HOST = "all"  # the name of the process of all envs
HEARTBEAT_S = 0.5
MAX_TOKENS = 240
SLOTS = 96  # sequences that a server works on at a time
PULL_S = 0.5
SWAP_S = 0.2


@dataclass(frozen=True)
class Speeds:
    """How long the stand-ins take, in seconds, and how long answers are."""

    train_s: float
    publish_s: float = 0.2
    write_s: float = 0.4  # from the beginning of publishing to the announcement
    overhead_s: float = 0.04  # of a request
    token_s: float = 0.04  # a token of each sequence
    sequence_s: float = 0.001  # for each sequence, a token
    tokens: float = 40.0  # the median length of an answer
    spread: float = 0.4  # the standard deviation of the logarithm of the lengths


# ---- a server ------------------------------------------------------------------------------------


@dataclass
class Sequence:
    """An answer in the making. `versions`: of each of its tokens."""

    length: int
    versions: list[int] = field(default_factory=list[int])


class StubServer:
    """Samples a token of each of its sequences at a time."""

    def __init__(self, name: str, speeds: Speeds) -> None:
        self.name = name
        self.speeds = speeds
        self.version = -1
        self.newest = -1
        self.waiting = deque[tuple[Sequence, Future[None]]]()
        self.running = list[tuple[Sequence, Future[None]]]()
        self.is_paused = False
        self.spent = {"asked_s": 0.0, "paused_s": 0.0, "idle_s": 0.0}
        self.work = asyncio.Event()

    async def compute(self) -> None:
        """Sample for as long as the loop runs. Each token begins when the one before was due, so
        that a process that wakes up late makes up for it.
        """
        due_s = time.monotonic()
        while True:
            while self.waiting and len(self.running) < SLOTS:
                self.running.append(self.waiting.popleft())
            if not self.running or self.is_paused:
                self.work.clear()
                await self.work.wait()
                due_s = time.monotonic()
                continue
            due_s += self.speeds.token_s + self.speeds.sequence_s * len(self.running)
            await asyncio.sleep(due_s - time.monotonic())
            for sequence, done in self.running:
                sequence.versions.append(self.version)
                if len(sequence.versions) == sequence.length:
                    done.set_result(None)
            self.running = [(s, done) for s, done in self.running if not done.done()]

    async def keep_account(self) -> None:
        """Note where the time goes."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            now_s = time.monotonic()
            is_asked = self.running or self.waiting
            activity = "paused_s" if self.is_paused else "asked_s" if is_asked else "idle_s"
            self.spent[activity] += now_s - last_s
            last_s = now_s

    async def load(self, version: PolicyVersion, send: Callable[[Metric], None]) -> None:
        heard_s = max(time.time() - version.time_s, 0.0)
        await asyncio.sleep(PULL_S)
        if self.version >= 0:
            self.is_paused = True
            await asyncio.sleep(SWAP_S)
        self.version = version.version
        self.is_paused = False
        self.work.set()
        values = {"inference/heard_s": heard_s, "inference/pull_s": PULL_S}
        send(
            Metric(
                source=self.name,
                time_s=time.time(),
                step=version.version,
                values={**values, "inference/swap_s": SWAP_S},
            )
        )

    async def answer(self, path: str, body: Any) -> Any:
        if path.startswith("/v1/chat/completions/render"):
            return {"token_ids": rendered(body["messages"], [])}
        await asyncio.sleep(self.speeds.overhead_s)
        prompt = text_of(body["token_ids"])
        sequences = [
            Sequence(self.length(prompt, index)) for index in range(body["sampling_params"]["n"])
        ]
        dones = [Future[None]() for _ in sequences]
        self.waiting.extend(zip(sequences, dones, strict=True))
        self.work.set()
        await asyncio.gather(*[asyncio.wrap_future(done) for done in dones])
        return {"choices": [choice(sequence) for sequence in sequences]}

    def length(self, prompt: str, index: int) -> int:
        """Half of the variance of lengths is that of problems. Answers to sums are half as long."""
        of_problem = Random(prompt).gauss()
        of_answer = Random(f"{prompt} {index}").gauss()
        tokens = self.speeds.tokens * (0.5 if "+" in prompt else 1.0)
        spread = self.speeds.spread * (of_problem + of_answer) / math.sqrt(2)
        return min(max(round(tokens * math.exp(spread)), 2), MAX_TOKENS)

    def record(self) -> Server:
        return Server(
            server_id=self.name,
            url=self.url,
            version=self.version,
            state="ready" if self.version >= 0 else "starting",
            heartbeat_s=time.time(),
            in_flight=len(self.running) + len(self.waiting),
        )

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: Connection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def choice(sequence: Sequence) -> dict[str, Any]:
    spans = list[dict[str, Any]]()
    for position, version in enumerate(sequence.versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": position, "end": position})
        spans[-1]["end"] = position + 1
    tokens = [*Random(len(sequence.versions)).choices(range(48, 58), k=sequence.length - 1), END]
    return {
        "finish_reason": "stop",
        "token_ids": tokens,
        "weight_versions": spans,
        "text": bytes(tokens[:-1]).decode(),
        "logprobs": {"content": [{"logprob": -1.0}] * len(tokens)},
    }


class Connection(asyncio.Protocol):
    """A client of a server, one request at a time."""

    def __init__(self, server: StubServer) -> None:
        self.server = server
        self.parser = httptools.HttpRequestParser(self)
        self.path = ""
        self.body = bytearray()
        self.tasks = set[asyncio.Task[None]]()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path = url.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        body = json.loads(self.body)
        self.body.clear()
        task = asyncio.create_task(self.reply(self.path, body))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def reply(self, path: str, body: Any) -> None:
        content = json.dumps(await self.server.answer(path, body)).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        self.transport.write(head + content)


def serve(run: RunFile, log: Log, stop: threading.Event, speeds: Speeds) -> None:
    """Be all servers of the run until `stop` is set."""
    asyncio.run(_serve(run, log, stop, speeds))


async def _serve(run: RunFile, log: Log, stop: threading.Event, speeds: Speeds) -> None:
    names = [topology.inference_part(topology.GENERATION, i) for i in range(run.inference.replicas)]
    servers = [StubServer(name, speeds) for name in names]
    producer = log.producer()

    def send(record: Metric | Server) -> None:
        if isinstance(record, Metric):
            producer.send(to_message(Output(topology.METRICS, record.source, record)))
        else:
            producer.send(to_message(Output(topology.SERVERS, record.server_id, record)))

    async def follow(reader: Any) -> None:
        newest: PolicyVersion | None = None
        while True:
            for message in await asyncio.to_thread(reader.poll, 100, 0.05):
                newest = record_in(message, PolicyVersion) or newest
            for server in servers:
                if newest and newest.version > server.newest:
                    server.newest = newest.version
                    tasks.append(asyncio.create_task(server.load(newest, send)))

    tasks = list[asyncio.Task[None]]()
    for server in servers:
        await server.open()
        tasks.append(asyncio.create_task(server.compute()))
        tasks.append(asyncio.create_task(server.keep_account()))
    reader = log.reader({topology.POLICY_VERSIONS_PARTITION: 0})
    following = asyncio.create_task(follow(reader))
    while not stop.is_set():
        for server in servers:
            send(server.record())
            values = {f"inference/{name}": value for name, value in server.spent.items()}
            send(Metric(source=server.name, time_s=time.time(), values=values))
        await asyncio.sleep(HEARTBEAT_S)
    for task in [following, *tasks]:
        task.cancel()
    await asyncio.gather(following, *tasks, return_exceptions=True)
    producer.close()
    reader.close()


# ---- the learner ---------------------------------------------------------------------------------


def train(run: RunFile, log: Log, stop: threading.Event, speeds: Speeds, steps: int) -> None:
    """Be the learner for so many steps, then set `stop`."""
    identity = topology.learner_identity(run.learner.name)
    writer = log.writer(identity, topology.POLICY_VERSIONS)
    producer = log.producer()

    def announce(version: int, after_s: float) -> None:
        time.sleep(after_s)
        record = PolicyVersion(
            learner=run.learner.name,
            version=version,
            uri="",
            size_bytes=0,
            sha256=str(version),
            batch=version - 1 if version else None,
            time_s=time.time(),
        )
        writer.commit([to_message(Output(topology.POLICY_VERSIONS, run.learner.name, record))])

    announce(0, 0.0)
    with ThreadPoolExecutor(1) as background:
        pending: Future[None] | None = None
        waiting_s = time.monotonic()
        for batch, _ in follow_batches_until(log, 0, stop):
            began_s = time.monotonic()
            time.sleep(speeds.train_s)
            trained_s = time.monotonic()
            if pending:
                pending.result()
            waited_s = time.monotonic() - trained_s
            pending = background.submit(announce, batch.number + 1, speeds.write_s)
            time.sleep(speeds.publish_s)
            values = {
                "learner/step_s": trained_s - began_s,
                "learner/idle_s": began_s - waiting_s,
                "learner/publish_s": time.monotonic() - trained_s,
                "learner/publish_wait_s": waited_s,
            }
            metric = Metric(source=identity, time_s=time.time(), step=batch.number, values=values)
            producer.send(to_message(Output(topology.METRICS, identity, metric)))
            waiting_s = time.monotonic()
            if batch.number + 1 >= steps:
                pending.result()
                break
    stop.set()
    producer.close()
    writer.close()


# ---- the run -------------------------------------------------------------------------------------


def run_loop(run: RunFile, speeds: Speeds, steps: int, limit_s: float) -> Log:
    """Run the loop for so many steps, and give its log. Raises TimeoutError."""
    log = MemoryLog({topic.name.partition(".")[2]: topic.partitions for topic in plan(run)})
    stop = threading.Event()
    parts: list[Callable[[], None]] = [
        partial(serve, run, log, stop, speeds),
        partial(train, run, log, stop, speeds, steps),
        partial(buffer.main, run, log, stop, 0),
        partial(batcher.main, run, log, stop),
        partial(envs.host_main, run, log, stop, HOST),
    ]
    with ThreadPoolExecutor(len(parts)) as pool:
        running = [pool.submit(part) for part in parts]
        try:
            _, not_done = wait(running, limit_s, FIRST_COMPLETED)
            is_late = len(not_done) == len(parts)
        finally:
            stop.set()
    for each in running:
        each.result()
    if is_late:
        raise TimeoutError(f"{run.run}: {steps} steps took longer than {limit_s:.0f} s")
    return log
