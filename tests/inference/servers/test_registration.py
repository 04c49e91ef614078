"""What a server says of itself, on `servers` and as metrics."""

from __future__ import annotations

from typing import cast

import pytest

from streamrl.inference.servers import registration
from streamrl.inference.servers.engine import Load
from streamrl.inference.servers.registration import Registration, heartbeat
from streamrl.inference.servers.vllm_host import VllmHost
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric, Server
from streamrl.system.errors import InferenceError
from tests.support.data_path import published

ME = Server(server_id="inference-0", url="")


class StandIn:
    """A host whose vLLM has this load, or does not answer."""

    url = "http://127.0.0.1:1"

    def __init__(self, load: Load | InferenceError | None = None) -> None:
        self._load = load

    def read_load(self) -> Load | None:
        if isinstance(self._load, InferenceError):
            raise self._load
        return self._load


def host(load: Load | InferenceError | None = None) -> VllmHost:
    return cast(VllmHost, StandIn(load))


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog({"servers": 1, "metrics": 1})


def records(log: MemoryLog) -> list[Server | None]:
    events = [to_event(message, ("server",)) for message in read(log, "servers", 0, 0)]
    return [cast(Server | None, event.record) for event in events]


def metrics(log: MemoryLog) -> dict[str, float]:
    values: dict[str, float] = {}
    for record in published(log, "metrics", Metric):
        values |= record.values
    return values


def test_it_is_there_from_the_start_and_leaves_with_a_tombstone(log: MemoryLog):
    registered = Registration(log, ME, 60.0)
    registered.remove()
    first, last = records(log)
    assert first is not None and first.state == "starting" and last is None


def test_a_heartbeat_is_due_after_its_time_and_may_be_left_out(log: MemoryLog):
    assert not Registration(log, ME, 60.0).due()
    registered = Registration(log, ME, 0.0)
    assert registered.due()
    registered.skip()
    assert len(records(log)) == 2, "one of each, and none for the one that was left out"


def test_a_heartbeat_has_the_load(log: MemoryLog):
    registered = Registration(log, ME, 60.0)
    load = Load(3, 77, {"idle_s": 1.5}, requests={"second": 2}, answers={"second": 16})
    heartbeat(host(load), registered, Meter(log, "inference-0"), 0.0)
    assert registered.server.in_flight == 3
    assert metrics(log) == {
        "inference/idle_s": 1.5,
        "inference/in_flight": 3.0,
        "inference/generated_tokens": 77.0,
        "inference/requests/second": 2.0,
        "inference/answers/second": 16.0,
    }


def test_before_vllm_is_up_there_is_a_heartbeat_without_a_load(log: MemoryLog):
    registered = Registration(log, ME, 60.0)
    heartbeat(host(), registered, Meter(log, "inference-0"), 0.0)
    assert len(records(log)) == 2 and metrics(log) == {}


def test_a_server_that_does_not_answer_is_silent_and_then_ended(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    registered = Registration(log, ME, 60.0)
    silent = host(InferenceError("vLLM does not answer"))
    meter = Meter(log, "inference-0")
    monkeypatch.setattr(registration, "UNRESPONSIVE_S", float("inf"))
    assert heartbeat(silent, registered, meter, 12.5) == 12.5
    assert len(records(log)) == 1
    monkeypatch.setattr(registration, "UNRESPONSIVE_S", -1.0)
    with pytest.raises(InferenceError, match="does not answer"):
        heartbeat(silent, registered, meter, 12.5)
