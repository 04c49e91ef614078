"""Replicas of the gateway in threads, on a log in memory, with a stub of vLLM behind them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.keys import Key, Right, keys_of
from streamrl.extensions.gateway.process import main
from streamrl.stream.log.codec import decode, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import ModelCall, Record
from tests.support.sampling_stub import SamplingStub, Say, by_checksum
from tests.support.waiting import patience, until

ENV = "agent"
BEAT_S = 0.5
TOPICS = {
    topology.turns(ENV): 2,
    topology.SERVERS: 1,
    topology.DEMAND: 1,
    topology.METRICS: 1,
}


def run_of(
    directory: Path,
    sessions: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **gateway: Any,
) -> RunFile:
    env = {"kind": "copy-digits", "max_tokens": 200, "timeout_s": 20.0}
    return run_file.parse(
        {
            "run": "gw",
            "runs_dir": str(directory),
            "model": model or {},
            "envs": {ENV: {**env, "sessions": sessions or {}}},
            "gateway": {"port": 0, **gateway},
        }
    )


class Gateways:
    """A log, a server that samples, and the replicas that a test starts."""

    def __init__(self, run: RunFile, stub: SamplingStub, log: Log | None = None) -> None:
        self.run = run
        self.stub = stub
        self.log = log or MemoryLog(TOPICS)
        self._replicas: dict[str, tuple[threading.Event, threading.Thread]] = {}
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def start(self) -> str:
        """Start another replica. Returns its URL."""
        urls = Queue[str]()
        stop = threading.Event()
        number = len(self._replicas)
        arguments = (self.run, self.log, stop, number, urls.put)
        thread = threading.Thread(target=main, args=arguments, daemon=True)
        thread.start()
        url = urls.get(timeout=patience(20))
        self._replicas[url] = stop, thread
        return url

    def stop(self, url: str) -> None:
        stop, thread = self._replicas.pop(url)
        stop.set()
        thread.join(patience(20))
        assert not thread.is_alive()

    def close(self) -> None:
        self.stub.gate.set()
        for url in list(self._replicas):
            self.stop(url)
        self._over.set()
        self._beating.join(patience(20))
        assert not self._beating.is_alive()

    def begin(self, url: str, session: str = "s0", **fields: Any) -> dict[str, Any]:
        """Begin a session. Returns its keys and where to call."""
        body = {"task_id": "7", "session_id": session, **fields}
        answer = self.opened(url, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def key(self, right: Right = "open", env: str = ENV, session: str = "") -> str:
        """A key of the run, as `streamrl gateway-key` and start_session make them."""
        return keys_of(self.run).make(Key(right, env, session), time.time(), 3_600.0)

    def opened(self, url: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        """What start_session answers, once the replica has heard of a server. `key`: instead of one
        that opens sessions of the env.
        """
        env = body.get("env") or ENV
        headers = {"Authorization": f"Bearer {self.key(env=env) if key is None else key}"}

        def answered() -> httpx.Response | None:
            start = f"{url}/rl/start_session"
            response = httpx.post(start, json=body, headers=headers, timeout=patience(20))
            return None if response.status_code == 503 else response

        answer = until(answered, 20, "no server has been heard of")
        assert answer is not None
        return answer

    def records(self, topic: str = "") -> list[Record]:
        """Everything in a topic, partition by partition."""
        topic = topic or topology.turns(ENV)
        records = list[Record]()
        for partition in range(self.log.topics()[topic]):
            for message in read(self.log, topic, partition):
                assert message.value is not None
                records.append(decode(dict(message.headers)["schema"], message.value))
        return records

    def calls(self) -> list[ModelCall]:
        return [record for record in self.records() if isinstance(record, ModelCall)]

    def _beat(self) -> None:
        producer = self.log.producer()
        while True:
            record = self.stub.record()
            producer.send(to_message(Output(topology.SERVERS, self.stub.name, record)))
            if self._over.wait(BEAT_S):
                return


@contextmanager
def gateways(
    directory: Path, say: Say = by_checksum, log: Log | None = None, **settings: Any
) -> Iterator[Gateways]:
    """`log`: of a broker, instead of one in memory."""
    with SamplingStub(say=say) as stub:
        running = Gateways(run_of(directory, **settings), stub, log)
        try:
            yield running
        finally:
            running.close()
