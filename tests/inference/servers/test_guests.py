"""A server with the adapters of other runs: the loop with a host that only notes what it loads, and
a log in memory for each run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.inference.servers import guests, load_schedule, process, vllm_host
from streamrl.inference.servers.engine import Load
from streamrl.inference.servers.probe import Mismatch
from streamrl.inference.servers.vllm_host import LoadResult
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric, PolicyVersion, Server
from streamrl.system.errors import InferenceError
from tests.support.data_path import publish, published
from tests.support.waiting import patience, until

TOPICS = {"policy-versions": 1, "servers": 1, "metrics": 1}
RUN = run_file.parse(
    {
        "run": "own",
        "envs": {"copy-digits": {}},
        "learner": {"lora": {"rank": 4}},
        "inference": {
            "heartbeat_s": 0.05,
            "also_serves": {"second": {}, "third": {}},
        },
    }
)


class Host:
    """Loads every version, unless `refuses` has an error for its run. It has the weights of a run
    in `waits` once that event is set.
    """

    def __init__(self, run: RunFile, identity: str, index: int, stop: threading.Event) -> None:
        self.url = ""
        self.seed = 7002

    def load_version(self, version: PolicyVersion, guest: str) -> LoadResult:
        if guest in Agent.waits:
            assert Agent.waits[guest].wait(patience(30))
        if guest in Agent.refuses:
            raise Agent.refuses[guest]
        Agent.loaded.append((guest, version.version))
        self.url = "http://127.0.0.1:8000"
        name = f"policy-{version.version}-{len(Agent.loaded)}"
        return LoadResult(version.version, Mismatch(1e-6, 63), 0.5, None, 0.05, name)

    def alive(self) -> bool:
        return True

    def vllm_metrics(self) -> bytes:
        return b""

    def read_load(self) -> Load | None:
        if Agent.is_silent:
            raise InferenceError("vLLM does not answer /metrics")
        return Load(3, 77, {}, {}, {}) if self.url else None

    def stop(self) -> None: ...


class Agent:
    """The agent in a thread, and the logs of all runs. A run that has none has not begun."""

    refuses: dict[str, Exception]
    waits: dict[str, threading.Event]
    loaded: list[tuple[str, int]]
    is_silent: bool

    def __init__(self) -> None:
        self.logs = {"own": MemoryLog(TOPICS), "second": MemoryLog(TOPICS)}
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._main)
        Agent.refuses = {}
        Agent.waits = {}
        Agent.loaded = []
        Agent.is_silent = False

    def _main(self) -> None:
        try:
            process.main(RUN, self.logs["own"], self.stop, open_log=self.open)
        except BaseException as error:  # handed to the test
            self.error = error

    def open(self, run: RunFile, name: str) -> MemoryLog:
        return self.logs.get(name) or MemoryLog({})

    def announce(self, run: str, *versions: int, learner: str = "lead") -> None:
        for number in versions:
            record = PolicyVersion(
                learner=learner, version=number, uri="file:///x", size_bytes=1, sha256="0"
            )
            publish(self.logs[run], Output("policy-versions", learner, record))

    def records(self, run: str) -> list[Server | None]:
        messages = read(self.logs[run], "servers", 0, 0)
        return [cast(Any, to_event(message, ("server",)).record) for message in messages]

    def last(self, run: str) -> Server | None:
        return next(reversed(self.records(run)), None)

    def serving(self, run: str, version: int) -> Server:
        def record() -> Server | None:
            last = self.last(run)
            return last if last and (last.state, last.version) == ("ready", version) else None

        return until(record, 30, lambda: f"{self.last(run)}, {self.error}") or Server(
            server_id="", url=""
        )

    def end(self) -> None:
        self.stop.set()
        self.thread.join(patience(30))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(vllm_host, "VllmHost", Host)
    monkeypatch.setattr(guests, "LOOK_S", 0.02)
    monkeypatch.setattr(load_schedule, "RETRY_S", 0.02)
    made = Agent()
    yield made
    if made.thread.is_alive():
        made.end()


def test_each_run_is_served_its_own_newest_version(server: Agent, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    server.announce("second", 6, 7)
    server.announce("own", 2)
    server.thread.start()
    own = server.serving("own", 2)
    second = server.serving("second", 7)
    assert (own.server_id, own.model) == ("inference-0", "policy-2-1")
    assert (second.server_id, second.model) == ("own.inference-0", "policy-7-2")
    assert second.url == own.url and second.pool == "generation"
    server.announce("second", 8)
    server.serving("second", 8)
    server.announce("own", 3)
    server.serving("own", 3)
    assert server.loaded == [("", 2), ("second", 7), ("second", 8), ("", 3)]
    metrics = published(server.logs["second"], "metrics", Metric)
    assert {(metric.source, metric.step) for metric in metrics} == {
        ("own.inference-0", 7),
        ("own.inference-0", 8),
    }
    until(lambda: (last := server.last("second")) and last.in_flight == 3)
    server.end()
    assert server.error is None
    assert "run second: version 7 is served" in caplog.text
    assert server.last("own") is None and server.last("second") is None, "a tombstone in each"


def test_a_guest_waits_until_the_servers_own_run_has_a_version(server: Agent):
    server.announce("second", 7)
    server.thread.start()
    until(lambda: len(server.records("second")) >= 3)
    assert server.loaded == []
    server.announce("own", 0)
    server.serving("second", 7)
    assert server.loaded == [("", 0), ("second", 7)]


def test_a_guest_that_has_not_begun_is_served_once_it_has(server: Agent):
    server.announce("own", 0)
    server.thread.start()
    server.serving("own", 0)
    server.logs["third"] = MemoryLog(TOPICS)
    server.announce("third", 1)
    server.serving("third", 1)


def test_a_guest_whose_weights_come_slowly_keeps_nobody_waiting(server: Agent):
    server.waits["second"] = threading.Event()
    server.logs["third"] = MemoryLog(TOPICS)
    server.announce("own", 0)
    server.announce("second", 7)
    server.announce("third", 1)
    server.thread.start()
    server.serving("third", 1)
    server.announce("own", 1)
    server.serving("own", 1)
    assert {run for run, _ in server.loaded} == {"", "third"}
    server.waits["second"].set()
    server.serving("second", 7)


def test_a_guest_whose_learner_has_another_name_hears_so(server: Agent):
    server.announce("own", 0)
    server.announce("second", 7, learner="sharper")
    server.thread.start()
    until(lambda: (last := server.last("second")) and "learner sharper" in last.error)
    server.announce("second", 8)
    assert server.serving("second", 8).error == ""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (InferenceError("another base"), "another base"),
        (ValueError("no logprobs to compare"), "ValueError: no logprobs to compare"),
    ],
)
def test_a_guest_that_is_refused_hears_why_and_stops_nobody(
    server: Agent, error: Exception, says: str
):
    server.refuses["second"] = error
    server.announce("own", 0)
    server.announce("second", 7)
    server.thread.start()
    until(lambda: (last := server.last("second")) and last.error)
    refused = server.last("second")
    assert refused is not None and (refused.state, refused.error) == ("starting", says)
    server.announce("own", 1)
    server.serving("own", 1)
    del server.refuses["second"]  # it is tried again
    assert server.serving("second", 7).error == ""


def test_a_guest_whose_log_fails_is_left_and_looked_for_again(
    server: Agent, monkeypatch: pytest.MonkeyPatch
):
    server.announce("own", 0)
    server.announce("second", 7)
    server.thread.start()
    server.serving("second", 7)
    # Retention or a run that was begun anew: the reader's place is gone.
    old = server.logs["second"]
    server.logs["second"] = MemoryLog(TOPICS)
    server.announce("second", 0)
    old.delete_before({("policy-versions", 0): 1})
    publish(old, Output("policy-versions", "lead", None))
    old.delete_before({("policy-versions", 0): 2})
    server.serving("second", 0)
    server.announce("own", 1)
    server.serving("own", 1)


def test_a_vllm_that_does_not_answer_sends_no_heartbeats_to_guests(server: Agent):
    server.announce("own", 0)
    server.announce("second", 7)
    server.thread.start()
    server.serving("second", 7)
    Agent.is_silent = True

    def stands() -> bool:
        """A heartbeat that was under way has arrived."""
        before = len(server.records("second"))
        server.thread.join(0.3)
        return len(server.records("second")) == before

    until(stands)
    Agent.is_silent = False
    before = len(server.records("second"))
    until(lambda: len(server.records("second")) > before)
