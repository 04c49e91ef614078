"""Whose version a server loads next, and what it says once the version is loaded."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from streamrl.inference.servers.probe import Mismatch, ProbeTolerance
from streamrl.inference.servers.registration import Registration
from streamrl.inference.servers.served_run import ServedRun
from streamrl.inference.servers.vllm_host import LoadResult
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.records import Metric, PolicyVersion, Server
from streamrl.system.errors import WeightError
from tests.support.data_path import published
from tests.support.waiting import patience


class Host:
    url = "http://127.0.0.1:1"
    seed = 7002


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog({"servers": 1, "metrics": 1})


def served(log: MemoryLog, guest: str = "", version: int | None = None) -> ServedRun:
    made = ServedRun(
        guest=guest,
        announced=cast(Any, None),
        registration=Registration(log, Server(server_id="inference-0", url=""), 60.0),
        meter=Meter(log, "inference-0"),
        tolerance=ProbeTolerance(1e-3),
    )
    if version is not None:
        made.newest = PolicyVersion(
            learner="lead", version=version, uri="file:///x", size_bytes=1, sha256="0"
        )
    return made


class SlowHost(Host):
    """Has loaded a version once `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.loads = 0

    def load_version(self, version: PolicyVersion, guest: str) -> LoadResult:
        self.loads += 1
        assert self.go.wait(patience(30))
        return LoadResult(version.version, Mismatch(0.0, 7), 0.5, None, 0.0)


def test_one_version_at_a_time_is_loaded_and_each_once(log: MemoryLog):
    run = served(log, version=3)
    host = SlowHost()
    with ThreadPoolExecutor(2) as worker:
        for _ in range(3):
            run.load_newest(cast(Any, host), worker)
        host.go.set()
        run.wait_for_load(patience(30))
        for _ in range(3):
            run.load_newest(cast(Any, host), worker)
    assert host.loads == 1 and run.registration.server.version == 3


def after_load(run: ServedRun, outcome: float | Exception) -> Server:
    """What the server says after version 3 has been loaded, with a probe that is off by so much, or
    has not been.
    """
    assert run.newest is not None
    run.schedule.on_attempt(run.newest)
    job: Future[LoadResult] = Future()
    if isinstance(outcome, Exception):
        job.set_exception(outcome)
    else:
        job.set_result(LoadResult(3, Mismatch(outcome, 7), 0.5, None, 0.0))
    run._finish_load(job, cast(Any, Host()))
    return run.registration.server


def will_be_loaded_again(run: ServedRun) -> bool:
    assert run.newest is not None
    return run.schedule.is_due(run.newest, 1e18)


def test_a_version_that_passes_its_probe_is_served(log: MemoryLog):
    run = served(log, version=3)
    server = after_load(run, 1e-6)
    assert (server.version, server.state, server.url) == (3, "ready", Host.url)
    assert server.seed == Host.seed
    (metric,) = published(log, "metrics", Metric)
    assert metric.values["inference/pull_s"] == 0.5
    assert not will_be_loaded_again(run)


def test_a_version_that_fails_its_probe_is_doubted(log: MemoryLog):
    run = served(log, version=3)
    server = after_load(run, 0.1)
    assert (server.version, server.state, server.doubted) == (3, "error", True)
    assert "differ from the learner's by up to 0.1" in server.error
    assert will_be_loaded_again(run)


def test_a_bad_copy_changes_nothing_but_the_error(log: MemoryLog):
    run = served(log, version=3)
    server = after_load(run, WeightError("damaged"))
    assert (server.version, server.state, server.error) == (-1, "starting", "damaged")
    assert will_be_loaded_again(run)
