"""A server whose pool has a model of its own, with a stand-in for the host."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from streamrl.inference.servers.own_model import serve_own_model
from streamrl.inference.servers.registration import Registration
from streamrl.inference.servers.vllm_host import VllmHost
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.records import Server
from streamrl.system.errors import InferenceError, ModelError
from tests.support.data_path import published

MODEL = Path("/models/judge")


class Host:
    """Starts its model, or fails to. It is asked for its load twice and then stops the loop, or
    has died.
    """

    url = "http://127.0.0.1:1"
    seed = 7002

    def __init__(self, stop: threading.Event, error: Exception | None, dies: bool) -> None:
        self.started: list[tuple[Path, str]] = []
        self._stop = stop
        self._error = error
        self._dies = dies
        self._beats = 0

    def start_model(self, directory: Path, name: str) -> None:
        self.started.append((directory, name))
        if self._error:
            raise self._error

    def alive(self) -> bool:
        return not (self._dies and self.started)

    def cause(self) -> str:
        return "out of memory"

    def read_load(self) -> None:
        if self.started:
            self._beats += 1
        if self._beats == 2:
            self._stop.set()


def served(error: Exception | None = None, dies: bool = False) -> tuple[Host, list[Server]]:
    log = MemoryLog({"servers": 1, "metrics": 1})
    stop = threading.Event()
    host = Host(stop, error, dies)
    entry = Registration(log, Server(server_id="inference-judges-0", url="", pool="judges"), 0.0)
    meter = Meter(log, "inference-judges-0")
    with ThreadPoolExecutor(1) as worker:
        serve_own_model(MODEL, cast(VllmHost, host), worker, entry, meter, stop)
    return host, published(log, "servers", Server)


def test_the_model_is_started_once_and_served_under_the_name_of_the_pool():
    host, records = served()
    assert host.started == [(MODEL, "judges")]
    last = records[-1]
    assert (last.state, last.model, last.url, last.version) == ("ready", "judges", host.url, -1)


def test_a_model_that_cannot_be_started_is_an_error():
    with pytest.raises(ModelError, match="^no config.json$"):
        served(error=ModelError("no config.json"))


def test_vllm_that_dies_is_an_error():
    with pytest.raises(
        InferenceError,
        match="^vLLM of inference-judges-0 died while serving /models/judge: out of memory$",
    ):
        served(dies=True)
