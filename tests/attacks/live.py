"""`python -m tests.attacks.live [ATTACK ...]`: a gateway on a real broker, and how long calls of
one client take while another does its worst. Exit code 1 if the 99th percentile is 1 s or more.

The gateway is a process of its own with 1,024 descriptors, as a shell gives it. The attacker is
another process. The model is a stub, so what a call takes is the gateway's time and the log's.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import yaml

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.gateway.key_command import make_key
from streamrl.stream.local_kafka import broker
from streamrl.stream.local_kafka.ports import free_port
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Server
from tests.support.beats import repeating
from tests.support.waiting import patience, until

ROOT = Path(__file__).parents[2]
ENV = "agent"
LIMIT_S = 1.0  # of the 99th percentile of another client's calls
LASTS_S = 8.0  # an attack, if it does not end by itself
PAUSE_S = 0.02  # between two calls of the other client
DESCRIPTORS = 1_024
BEAT_S = 0.5
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


class Target(NamedTuple):
    """What an attacker has: the address, and the key of a session of its own."""

    url: str
    key: str

    def connect(self) -> socket.socket:
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname, address.port), timeout=10)

    def post(self, content: bytes) -> None:
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        httpx.post(f"{self.url}/v1/chat/completions", content=content, headers=headers, timeout=60)

    @property
    def head(self) -> bytes:
        key = f"authorization: Bearer {self.key}\r\ncontent-type: application/json\r\n"
        return HEAD + key.encode()


def question(text: str, **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


# ---- the attacks ---------------------------------------------------------------------------------


def nothing(target: Target) -> None:
    time.sleep(LASTS_S / 2)


def silent_connections(target: Target) -> None:
    """More than the gateway has descriptors, each with the beginning of a request."""
    held = list[socket.socket]()
    for _ in range(3_000):
        with contextlib.suppress(OSError):
            client = target.connect()
            client.sendall(HEAD)
            held.append(client)
    time.sleep(LASTS_S / 2)


def heads_without_end(target: Target) -> None:
    def send(number: int) -> None:
        ends_s = time.monotonic() + LASTS_S
        while time.monotonic() < ends_s:
            with contextlib.suppress(OSError), target.connect() as client:
                client.sendall(HEAD + b"x: ")
                while time.monotonic() < ends_s:
                    client.sendall(b"x" * 65_536)

    at_once(send)


def bodies_without_end(target: Target) -> None:
    held = list[socket.socket]()
    for _ in range(40):
        with contextlib.suppress(OSError):
            client = target.connect()
            client.sendall(target.head + b"content-length: 7999999\r\n\r\n")
            for _ in range(79):
                client.sendall(b"x" * 100_000)
            held.append(client)
    time.sleep(LASTS_S / 2)


def bodies_in_pieces(target: Target) -> None:
    def send(number: int) -> None:
        ends_s = time.monotonic() + LASTS_S
        while time.monotonic() < ends_s:
            with contextlib.suppress(OSError), target.connect() as client:
                client.sendall(target.head + b"transfer-encoding: chunked\r\n\r\n")
                while time.monotonic() < ends_s:
                    client.sendall(b"1\r\nx\r\n" * 10_000)

    at_once(send)


def bodies_of_values(target: Target) -> None:
    body = b'{"messages":[],"x":[' + b"[]," * 2_600_000 + b"[]]}"
    again_and_again(target, lambda: body)


def bodies_at_the_limit(target: Target) -> None:
    """As many messages as are counted to be few enough."""
    messages = [{"role": "user", "content": "z"}] * 6_000
    body = json.dumps({"messages": messages}, separators=(",", ":")).encode()
    again_and_again(target, lambda: body)


def long_texts(target: Target) -> None:
    again_and_again(target, lambda: question("x" * 7_900_000))


def open_tags(target: Target) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    again_and_again(target, lambda: question(f"tags {time.monotonic_ns()}", tools=tools))


def agents_that_leave(target: Target) -> None:
    ends_s = time.monotonic() + LASTS_S
    while time.monotonic() < ends_s:
        body = question(f"bye {time.monotonic_ns()}", n=8)
        with contextlib.suppress(OSError), target.connect() as client:
            client.sendall(target.head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.01)


def wrong_keys(target: Target) -> None:
    wrong = target._replace(key="sk-sample.live.agent.s.0.9999999999." + "0" * 32)
    again_and_again(wrong, lambda: question("q"))


def bodies_with_wrong_keys(target: Target) -> None:
    wrong = target._replace(key="sk-sample.live.agent.s.0.9999999999." + "0" * 32)
    again_and_again(wrong, lambda: question("x" * 7_900_000))


def answers_not_taken(target: Target) -> None:
    """More than the gateway has descriptors, each with requests whose answers are left there."""
    requests = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 20_000
    held = list[socket.socket]()
    for _ in range(1_500):
        with contextlib.suppress(OSError):
            client = target.connect()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.setblocking(False)
            client.send(requests)
            held.append(client)
    time.sleep(LASTS_S / 2)


def ten_thousand_connections(target: Target) -> None:
    """Each asks once, and is kept."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = list[socket.socket]()
    for _ in range(10_000):
        with contextlib.suppress(OSError):
            client = target.connect()
            client.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            held.append(client)
    time.sleep(LASTS_S / 2)


def counts_of_tokens(target: Target) -> None:
    """A count costs a server as much as the prompt of a call, and is no call."""
    body = json.dumps({"input": "x" * 900_000}).encode()

    def send(number: int) -> None:
        ends_s = time.monotonic() + LASTS_S
        headers = {"authorization": f"Bearer {target.key}", "content-type": "application/json"}
        path = f"{target.url}/v1/responses/input_tokens"
        while time.monotonic() < ends_s:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(path, content=body, headers=headers, timeout=60)

    at_once(send)


def long_conversations_again(target: Target) -> None:
    """What a session has had is asked for, again and again."""
    headers = {"authorization": f"Bearer {target.key}", "content-type": "application/json"}
    items = [{"role": "user", "content": "z"}] * 400
    previous = None
    for _ in range(12):
        body = {"input": items, "previous_response_id": previous}
        answer = httpx.post(f"{target.url}/v1/responses", json=body, headers=headers, timeout=60)
        previous = answer.json()["id"]

    def send(number: int) -> None:
        ends_s = time.monotonic() + LASTS_S
        path = f"{target.url}/v1/responses/{previous}/input_items"
        while time.monotonic() < ends_s:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(path, headers=headers, timeout=60)

    at_once(send)


def many_choices(target: Target) -> None:
    again_and_again(target, lambda: question(f"tags {time.monotonic_ns()}", n=128))


def again_and_again(target: Target, body: Callable[[], bytes]) -> None:
    def send(number: int) -> None:
        ends_s = time.monotonic() + LASTS_S
        while time.monotonic() < ends_s:
            with contextlib.suppress(httpx.HTTPError):
                target.post(body())

    at_once(send)


def at_once(send: Callable[[int], None], clients: int = 8) -> None:
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(send, range(clients)))


ATTACKS = {
    attack.__name__: attack
    for attack in (
        nothing,
        silent_connections,
        heads_without_end,
        bodies_without_end,
        bodies_in_pieces,
        bodies_of_values,
        bodies_at_the_limit,
        long_texts,
        open_tags,
        agents_that_leave,
        wrong_keys,
        bodies_with_wrong_keys,
        answers_not_taken,
        ten_thousand_connections,
        counts_of_tokens,
        long_conversations_again,
        many_choices,
    )
}


# ---- the gateway, and its other client -----------------------------------------------------------


TAGS = 9  # the first token of a prompt that asks for 6,000 open tags


def generated(text: str, tokens: int) -> bytes:
    """The answer of a server, with this text in so many tokens, for as many choices as there may
    be.
    """
    choice = {
        "finish_reason": "stop",
        "token_ids": list(range(tokens)),
        "weight_versions": [{"version": "1", "start": 0, "end": tokens}],
        "text": text,
        "logprobs": {"content": [{"token": "?", "logprob": -0.5}] * tokens},
    }
    return json.dumps({"choices": [choice] * 128}).encode()


ANSWERS = {
    n: {
        is_tags: json.dumps({"choices": json.loads(answer)["choices"][:n]}).encode()
        for is_tags, answer in (
            (True, generated("<tool_call>" * 6_000, 6_000)),
            (False, generated("an answer", 3)),
        )
    }
    for n in (1, 8, 128)
}


async def server(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that answers as vLLM does, at no cost."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if scope["path"].endswith("/render"):
        answer = b'{"token_ids": [%d, 1, 2]}' % (TAGS if b"tags" in body else 0)
    else:
        asked = json.loads(body)
        answer = ANSWERS[asked["sampling_params"]["n"]][asked["token_ids"][0] == TAGS]
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def few_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))


@contextlib.contextmanager
def gateway(directory: Path) -> Iterator[tuple[RunFile, str]]:
    """A gateway on a broker of its own. Returns its run file and its address."""
    started = broker.start(directory / "kafka", die_with_parent=True)
    port = free_port()
    file = directory / "run.yaml"
    env = {"kind": "copy-digits", "max_tokens": 100_000, "sessions": {}}
    settings = {
        "run": "live",
        "runs_dir": str(directory),
        "kafka": {"bootstrap.servers": started.address},
        "envs": {ENV: env},
        "gateway": {"port": port},
        "metrics": {"serve": False},
    }
    file.write_text(yaml.safe_dump(settings))
    run = run_file.load(file)
    kafka = {"bootstrap.servers": started.address}
    topic_changes.apply(run, kafka)
    log = KafkaLog(kafka, run.run)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "streamrl.cli", "gateway", str(file), "--index", "0"]
    at = free_port()
    samples = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "tests.attacks.live:server", "--port", str(at)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    record = Server(
        server_id="inference-0",
        url=f"http://127.0.0.1:{at}",
        pool=topology.GENERATION,
        model="policy",
        version=1,
        state="ready",
    )
    with (directory / "gateway.log").open("wb") as output:
        producer = log.producer()

        def beat() -> None:
            producer.send(to_message(Output(topology.SERVERS, record.server_id, record)))

        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=ROOT, preexec_fn=few_descriptors
        )
        try:
            with repeating(beat, BEAT_S):
                until(lambda: is_up(url), 60, (directory / "gateway.log").read_text()[-500:])
                yield run, url
        finally:
            for each in (process, samples):
                each.kill()
                each.wait()
            producer.close()
            log.close()
            started.stop()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def begin(url: str, key: str, session: str) -> str:
    """The key that samples in a new session."""

    def opened() -> str:
        answer = httpx.post(
            f"{url}/rl/start_session",
            json={"task_id": "1", "session_id": session},
            headers={"authorization": f"Bearer {key}"},
            timeout=patience(10),
        )
        return str(answer.json()["api_key"]) if answer.is_success else ""

    key = until(opened, 60)

    def answered() -> bool:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        path = f"{url}/v1/chat/completions"
        return httpx.post(
            path, content=question("?"), headers=headers, timeout=patience(10)
        ).is_success

    until(answered, 60)
    return key


class Waits(NamedTuple):
    """The seconds that calls of the other client took."""

    calls: list[float]
    refused: int  # calls without an answer

    def at(self, share: float) -> float:
        ordered = sorted(self.calls)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def waits_during(attack: str, url: str, own: str, attackers: str) -> Waits:
    """Have another process attack, and call meanwhile."""
    command = [sys.executable, "-m", "tests.attacks.live", attack, url, attackers]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    calls = list[float]()
    refused = 0
    headers = {"authorization": f"Bearer {own}"}
    number = 0
    with httpx.Client(timeout=patience(60)) as client:
        while process.poll() is None:
            number += 1
            body = {"messages": [{"role": "user", "content": f"{attack} {number}"}]}
            began_s = time.perf_counter()
            try:
                answer = client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
                refused += not answer.is_success
            except httpx.TransportError:
                refused += 1
            calls.append(time.perf_counter() - began_s)
            time.sleep(PAUSE_S)
    return Waits(calls, refused)


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[2].startswith("http"):
        name, url, key = sys.argv[1:]
        threading.Timer(4 * LASTS_S, os._exit, (0,)).start()
        ATTACKS[name](Target(url, key))
        os._exit(0)
    is_held = True
    chosen = sys.argv[1:] or list(ATTACKS)
    alone = 0.0  # the 99th percentile without an attack
    print(
        f"{'while another client does':26} calls refused median ms p99 ms worst ms p99/alone load"
    )
    with tempfile.TemporaryDirectory() as directory, gateway(Path(directory)) as (run, url):
        key = make_key(run, ENV, "open", days=1)
        for name in dict.fromkeys(["nothing", *chosen]):
            own = begin(url, key, f"own-{name}")
            waits = waits_during(name, url, own, begin(url, key, f"attacker-{name}"))
            p99 = waits.at(0.99)
            alone = alone or p99
            is_held = is_held and p99 < LIMIT_S and not waits.refused
            print(
                f"{name.replace('_', ' '):26} {len(waits.calls):5} {waits.refused:7}"
                f" {waits.at(0.5) * 1e3:9.0f} {p99 * 1e3:6.0f} {max(waits.calls) * 1e3:8.0f}"
                f" {p99 / alone:9.1f} {os.getloadavg()[0]:4.0f}",
                flush=True,
            )
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
