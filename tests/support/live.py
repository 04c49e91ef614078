"""Real servers for tests: agents with vLLM on the tiny model, fed from a log in memory, and the
learner's own logprobs to hold them to.

Starting vLLM takes most of a minute, so one agent is shared by the tests of a file: the fixture
`servers`. It ends with them, because a server that nobody asks still wakes up all the time. It
moves on from version to version; a test takes the next number with `announce` and never assumes
one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.inference.clients.client import Client, make_client
from streamrl.inference.servers import process
from streamrl.learner.files.export import WEIGHTS
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import PolicyVersion, Probe, Server
from streamrl.weights.store import Store, version_name
from tests.support.waiting import patience, until

CONTEXT = 256  # tokens
EOS = 2  # of the tiny tokenizer
KEY = "a-key-for-the-live-servers"
KEY_VARIABLE = "STREAMRL_TEST_LIVE_KEY"
START_S = 240.0


class LiveServers:
    """A log, a store, versions of a model, and the agents that serve them. `origin`: the directory
    of the model, by default a tiny one.
    """

    def __init__(self, directory: Path, origin: Path | None = None) -> None:
        self.run = run_file(directory)
        self.log = MemoryLog({"policy-versions": 1, "servers": 1, "metrics": 1})
        self.store = Store(self.run.store)
        self.version = -1
        from streamrl.learner.initial import write_tiny  # JAX: only for those who use a live server

        self._origin = origin or write_tiny(directory / "origin", self.run.model.tiny, CONTEXT)
        self._versions = directory  # with a model directory for each version
        self._agents: list[tuple[threading.Thread, threading.Event]] = []
        self.errors: dict[str, BaseException] = {}
        # Of other runs, whose adapters the agents may serve.
        self.logs: dict[str, MemoryLog] = {}

    def announce(
        self, spoil: Callable[[Path], None] = lambda stored: None, hide: Sequence[str] = ()
    ) -> int:
        """Write the next version and announce it. Returns its number. `spoil` and `hide` are those
        of `prepare`.
        """
        return self.tell(self.prepare(spoil, hide))

    def tell(self, record: PolicyVersion) -> int:
        self.write("policy-versions", record.learner, record)
        return record.version

    def prepare(
        self, spoil: Callable[[Path], None] = lambda stored: None, hide: Sequence[str] = ()
    ) -> PolicyVersion:
        """Write the next version, with the learner's logprobs of a probe.

        `spoil` gets the stored directory after it was claimed; the tensors in `hide` are left out
        of what servers load.
        """
        self.version += 1
        whole = self._versions / version_name(self.version)
        tensors = perturb(load_file(self._origin / WEIGHTS), self.version)

        def write(directory: Path) -> None:
            for path in self._origin.iterdir():
                (directory / path.name).write_bytes(path.read_bytes())
            save_file(
                {n: t for n, t in tensors.items() if n not in hide},
                directory / WEIGHTS,
                metadata={"format": "pt"},
            )

        stored = self.store.put(self.version, write)
        whole.mkdir()
        for path in self._origin.iterdir():
            (whole / path.name).write_bytes(path.read_bytes())
        save_file(tensors, whole / WEIGHTS, metadata={"format": "pt"})
        spoil(Path(stored.uri.removeprefix("file://")))
        text = np.random.default_rng(self.version).integers(0, 16, 64).astype(np.uint16)
        probe = Probe(tokens=text, logprobs=self.logprobs(self.version, [text], 1.0)[0])
        return PolicyVersion(learner="lead", version=self.version, probe=probe, **stored._asdict())

    def logprobs(
        self, version: int, sequences: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """The learner's logprobs of each sequence's tokens[1:] under that version's weights,
        divided by the temperature.
        """
        from tests.support.parity import learner_logprobs

        return learner_logprobs(
            self._versions / version_name(version), sequences, temperature, CONTEXT
        )

    def start(self, index: int, pool: str = topology.GENERATION) -> str:
        """Start agent `index` of a pool in a thread. Returns its name on the topic `servers`."""
        stop = threading.Event()
        identity = topology.inference_part(pool, index)
        thread = threading.Thread(target=self._agent, args=(index, pool, stop))
        thread.start()
        self._agents.append((thread, stop))
        return identity

    def _agent(self, index: int, pool: str, stop: threading.Event) -> None:
        try:
            process.main(self.run, self.log, stop, index, pool, lambda run, name: self.logs[name])
        except BaseException as error:  # for the test that waits
            self.errors[topology.inference_part(pool, index)] = error

    def records(self) -> dict[str, Server | None]:
        """The last record of each server."""
        return {
            event.key: event.record
            for event in (to_event(m, ("server",)) for m in read(self.log, "servers", 0, 0))
        }  # type: ignore[misc]

    def until(
        self, identity: str, wanted: Callable[[Server], bool], timeout_s: float = 30.0
    ) -> Server:
        """Wait for a record of that server. Fails at once if its agent has ended without it."""

        def wanted_record() -> Server | None:
            ended = self.errors.get(identity)
            record = self.records().get(identity)
            if record is not None and wanted(record):
                return record
            assert ended is None, f"{identity} has ended: {ended}"
            return None

        record = until(
            wanted_record, timeout_s, lambda: f"{identity}: {self.records()}, {self.errors}"
        )
        assert record is not None
        return record

    def serving(self, identity: str, version: int, timeout_s: float = 30.0) -> Server:
        return self.until(
            identity, lambda s: s.state == "ready" and s.version == version, timeout_s
        )

    @asynccontextmanager
    async def client(self, *identities: str) -> AsyncIterator[Client]:
        """A client that hears of these servers, or of all, for as long as it is open."""
        client = make_client(self.run, topology.GENERATION)

        def listen() -> None:
            """To the end: after two minutes of heartbeats a part of the topic would be a time when
            a server had not come yet.
            """
            while messages := reader.poll(512, 0.0):
                for event in (to_event(message, ("server",)) for message in messages):
                    if not identities or event.key in identities:
                        client.on_server(event.key, event.record)  # type: ignore[arg-type]

        async def follow() -> None:
            while True:
                listen()
                await asyncio.sleep(0.1)

        reader = self.log.reader({("servers", 0): 0})
        listen()
        following = asyncio.create_task(follow())
        try:
            yield client
        finally:
            following.cancel()
            await client.close()

    def write(self, topic: str, key: str, record: Any) -> None:
        self.log.producer().send(to_message(Output(topic, key, record)))

    def close(self) -> None:
        for _, stop in self._agents:
            stop.set()
        for thread, _ in self._agents:
            thread.join(patience(60))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServers]:
    """One agent, `inference-0`, on a version that is ready: it came after two of them."""
    with patch.dict(os.environ, {KEY_VARIABLE: KEY}):
        live = LiveServers(tmp_path_factory.mktemp("live"))
        try:
            live.announce()
            latest = live.announce()
            live.serving(live.start(0), latest, START_S)
            yield live
        finally:
            live.close()


def run_file(directory: Path) -> RunFile:
    """Blocks of 32 tokens, so that prompts of some length do come from the prefix cache (on a CPU a
    block has 128 otherwise).
    """
    return parse(
        {
            "run": "live",
            "runs_dir": str(directory),
            "envs": {"copy-digits": {}},
            "batcher": {"max_seq_len": CONTEXT},
            "model": {"max_seq_len": CONTEXT},
            "inference": {
                "max_model_len": CONTEXT,
                "heartbeat_s": 0.2,
                "api_key": f"env:{KEY_VARIABLE}",
                "extra_args": ["--block-size", "32"],
            },
        }
    )


def perturb(tensors: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The tensors of a policy that every seed has of its own: those of the tiny model with noise of
    their own size, and a head that is not close to uniform.
    """
    rng = np.random.default_rng(seed)
    noisy = {
        name: t + rng.standard_normal(t.shape).astype(np.float32) * t.std()
        for name, t in sorted(tensors.items())
    }
    head = noisy["lm_head.weight"] * 10
    head[EOS] = 0  # answers of some length
    return {**noisy, "lm_head.weight": head}


def vllm_processes(url: str) -> list[psutil.Process]:
    """The API server that listens there, and below it the engine and its workers."""
    port = url.rpartition(":")[2]
    for running in psutil.process_iter(["cmdline"]):
        line = running.info["cmdline"] or []
        if (
            "vllm.entrypoints.openai.api_server" in line
            and line[line.index("--port") + 1] == port
            and "process_group.py" not in " ".join(line[:3])
        ):
            return [running, *running.children(recursive=True)]
    return []
