"""The agent's loop with a stand-in for the host (the one that owns vLLM): which version is served,
and what is said on `servers`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from streamrl.config.run_file import RunFile, parse, with_overrides
from streamrl.inference.servers import load_schedule, process, registration, vllm_host
from streamrl.inference.servers.engine import Load, Swap
from streamrl.inference.servers.probe import Mismatch
from streamrl.inference.servers.vllm_host import LoadResult
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric, PolicyVersion, Server
from streamrl.system.errors import ConfigError, InferenceError, TopicMissing, WeightError
from tests.support.waiting import patience, until

RUN = parse(
    {
        "run": "test",
        "envs": {"copy-digits": {}},
        "inference": {"heartbeat_s": 0.05, "probe_tolerance": 1e-3},
    }
)


class Host:
    """Serves what it is told to; `bad`: versions whose copy is altered; `off`: by how much the
    probe of a version differs.
    """

    bad: ClassVar[set[int]]
    off: ClassVar[dict[int, float]]
    silent: ClassVar[bool]
    made: ClassVar[Host]

    def __init__(self, run: RunFile, identity: str, index: int, stop: threading.Event) -> None:
        self.served = list[int]()
        self.models = list[tuple[Path, str]]()
        self.index = index
        self.url = ""
        self.seed = 7002
        self.ended = False
        self.stopped = False
        Host.made = self

    def load_version(self, version: PolicyVersion, guest: str) -> LoadResult:
        if version.version in self.bad:
            raise WeightError(
                f"version {version.version}: model.safetensors is not what was announced"
            )
        self.served.append(version.version)
        swap = Swap(0.01, 0.02, 0.04) if self.url else None
        self.url = "http://127.0.0.1:8000"
        return LoadResult(
            version.version, Mismatch(self.off.get(version.version, 1e-6), 63), 0.5, swap, 0.05
        )

    def start_model(self, directory: Path, name: str) -> None:
        self.models.append((directory, name))
        self.url = "http://127.0.0.1:8000"

    def alive(self) -> bool:
        return not self.ended

    def vllm_metrics(self) -> bytes:
        return b""

    def cause(self) -> str:
        return "RuntimeError: out of memory"

    def read_load(self) -> Load | None:
        if self.silent:
            raise InferenceError("vLLM does not answer /metrics")
        return Load(3, 77, {"idle_s": 1.5}, {}, {}) if self.url else None

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_host, "VllmHost", Host)
    monkeypatch.setattr(load_schedule, "RETRY_S", 0.2)
    for name, value in {"bad": set[int](), "off": dict[int, float](), "silent": False}.items():
        monkeypatch.setattr(Host, name, value, raising=False)


class Agent:
    """The agent in a thread, and what the log says about it."""

    def __init__(
        self, pool: str = "generation", run: RunFile = RUN, log: MemoryLog | None = None
    ) -> None:
        self.pool = pool
        self.run = run
        self.log = log or MemoryLog({"policy-versions": 1, "servers": 1, "metrics": 1})
        self.stop = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._main)

    def _main(self) -> None:
        try:
            process.main(self.run, self.log, self.stop, index=1, pool=self.pool)
        except Exception as error:  # handed to the test
            self.error = error

    def announce(self, *versions: int, learner: str = "lead") -> None:
        writer = self.log.producer()
        for version in versions:
            record = PolicyVersion(
                learner=learner, version=version, uri="file:///nowhere", size_bytes=1, sha256="0"
            )
            writer.send(to_message(Output("policy-versions", learner, record)))

    def records(self) -> list[Server | None]:
        return [to_event(m, ("server",)).record for m in read(self.log, "servers", 0, 0)]

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for message in read(self.log, "metrics", 0, 0):
            record = to_event(message, ("metric",)).record
            assert isinstance(record, Metric) and record.source == "inference-1"
            found |= record.values
        return found

    def until(self, wanted: Callable[[Server], bool]) -> Server:
        deadline = time.monotonic() + patience(30)
        while time.monotonic() < deadline:
            records = self.records()
            if records and (last := records[-1]) is not None and wanted(last):
                return last
            time.sleep(0.01)
        raise AssertionError(f"last record: {self.records()[-1:]}, error: {self.error}")


@contextmanager
def an_agent(**options: Any) -> Iterator[Agent]:
    made = Agent(**options)
    try:
        yield made
    finally:
        made.stop.set()
        if made.thread.is_alive():
            made.thread.join(patience(30))


@pytest.fixture
def agent() -> Iterator[Agent]:
    with an_agent() as made:
        yield made


def test_the_newest_version_of_the_lead_learner_is_served_and_no_other(agent: Agent):
    agent.announce(0, 1, 2)
    agent.announce(9, learner="other")
    agent.thread.start()
    first = agent.until(lambda s: s.state == "ready")
    assert (first.version, first.url, first.server_id, first.mismatch_tokens) == (
        2,
        "http://127.0.0.1:8000",
        "inference-1",
        63,
    )
    agent.announce(3)
    agent.until(lambda s: s.version == 3 and s.in_flight == 3)
    agent.announce(1)  # announced again by a learner that came back
    agent.announce(4)
    agent.until(lambda s: s.version == 4)
    assert Host.made.served == [2, 3, 4]
    wanted = {
        "inference/swap_s": 0.04,
        "inference/pull_s": 0.5,
        "inference/in_flight": 3.0,
        "inference/idle_s": 1.5,
        "inference/mismatch_tokens": 63.0,
    }
    assert agent.metrics().items() >= wanted.items()


def test_a_pool_with_a_model_of_its_own_takes_no_weights_of_the_run(tmp_path: Path):
    inference = {
        "heartbeat_s": 0.05,
        "pools": {"judges": {"replicas": 2, "model": str(tmp_path), "max_model_len": 64}},
    }
    run = parse({"run": "test", "envs": {"copy-digits": {}}, "inference": inference})
    with an_agent(pool="judges", run=run) as agent:
        agent.announce(0)
        agent.thread.start()
        served = agent.until(lambda s: s.state == "ready" and s.in_flight == 3)
        assert (served.server_id, served.model) == ("inference-judges-1", "judges")
        assert (served.version, served.max_model_len) == (-1, 64)
        assert Host.made.models == [(tmp_path, "judges")] and not Host.made.served
        Host.made.ended = True
        agent.thread.join(patience(30))
        assert f"died while serving {tmp_path}: RuntimeError: out of memory" in str(agent.error)


def test_it_beats_while_it_waits_for_the_first_version(agent: Agent):
    agent.thread.start()
    agent.until(lambda s: s.state == "starting")
    until(lambda: len(agent.records()) >= 3)
    beats = [r.heartbeat_s for r in agent.records() if r is not None]
    assert len(beats) >= 3 and beats == sorted(beats)


def test_a_bad_copy_leaves_the_old_version_in_service_until_a_good_one_comes(agent: Agent):
    Host.bad = {1}
    agent.announce(0)
    agent.thread.start()
    agent.until(lambda s: s.state == "ready")
    agent.announce(1)
    kept = agent.until(lambda s: bool(s.error))
    assert (kept.state, kept.version, kept.error) == (
        "ready",
        0,
        "version 1: model.safetensors is not what was announced",
    )
    agent.announce(2)
    assert agent.until(lambda s: s.version == 2).error == ""


def test_a_copy_that_was_bad_is_pulled_again(agent: Agent):
    Host.bad = {0}
    agent.announce(0)
    agent.thread.start()
    assert agent.until(lambda s: bool(s.error)).state == "starting"
    Host.bad = set()
    agent.until(lambda s: s.state == "ready" and s.version == 0)


def test_a_probe_that_differs_takes_the_server_out_of_service(agent: Agent):
    Host.off = {1: 0.65}
    agent.announce(0)
    agent.thread.start()
    agent.until(lambda s: s.state == "ready")
    agent.announce(1)
    wrong = agent.until(lambda s: s.version == 1)
    assert (
        wrong.state == "error"
        and "differ from the learner's by up to 0.65" in wrong.error
        and wrong.mismatch_max_abs == 0.65
    )
    agent.announce(2)
    assert agent.until(lambda s: s.version == 2).state == "ready"


def test_started_again_it_serves_what_another_tolerance_lets_pass():
    """The tolerance is read by each life: the probe is 0.005 off in both."""
    Host.off = {0: 0.005}
    with an_agent() as strict:
        strict.announce(0)
        strict.thread.start()
        assert strict.until(lambda s: s.version == 0).state == "error"
    looser = with_overrides(RUN, ["inference.probe_tolerance=0.01"])
    with an_agent(run=looser, log=strict.log) as lenient:
        lenient.thread.start()
        assert lenient.until(lambda s: s.version == 0).state == "ready"


def test_vllm_that_dies_ends_the_agent(agent: Agent):
    agent.announce(0)
    agent.thread.start()
    agent.until(lambda s: s.state == "ready")
    Host.made.ended = True
    agent.thread.join(patience(30))
    assert isinstance(
        agent.error, InferenceError
    ) and "inference-1 died while serving version 0: RuntimeError: out of memory" in str(
        agent.error
    )
    last = agent.records()[-1]
    assert last is not None and last.state == "error" and last.error == str(agent.error)
    assert Host.made.stopped


def test_vllm_that_says_nothing_for_too_long_ends_the_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registration, "UNRESPONSIVE_S", 0.2)
    agent.announce(0)
    agent.thread.start()
    agent.until(lambda s: s.state == "ready")
    Host.silent = True
    agent.thread.join(patience(30))
    assert isinstance(agent.error, InferenceError) and "does not answer /metrics" in str(
        agent.error
    )


def test_it_leaves_with_a_tombstone(agent: Agent):
    agent.announce(0)
    agent.thread.start()
    agent.until(lambda s: s.state == "ready")
    agent.stop.set()
    agent.thread.join(patience(30))
    assert agent.error is None and agent.records()[-1] is None and Host.made.stopped


def test_a_server_says_which_pool_it_belongs_to():
    run = parse(
        {
            "run": "test",
            "envs": {"copy-digits": {}},
            "inference": {"replicas": 2, "pools": {"evaluation": {"replicas": 2}}},
        }
    )
    log = MemoryLog({"policy-versions": 1, "servers": 1, "metrics": 1})
    stop = threading.Event()
    stop.set()
    process.main(run, log, stop, 1, "evaluation")
    first, last = [to_event(m, ("server",)) for m in read(log, "servers", 0, 0)]
    assert isinstance(first.record, Server) and (first.key, first.record.pool, Host.made.index) == (
        "inference-evaluation-1",
        "evaluation",
        3,
    )
    assert (last.key, last.record) == ("inference-evaluation-1", None)
    with pytest.raises(
        ConfigError, match="inference.pools has no 'eval'; there are generation, evaluation"
    ):
        process.main(run, log, stop, 0, "eval")


def test_without_the_topic():
    with pytest.raises(TopicMissing, match="policy-versions"):
        process.main(RUN, MemoryLog({"servers": 1, "metrics": 1}), threading.Event())
