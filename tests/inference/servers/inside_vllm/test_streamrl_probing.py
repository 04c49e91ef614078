"""The plugin inside vLLM that lets probes pass: found as one, and what it changes there."""

from __future__ import annotations

import logging
import sys
from collections import deque
from importlib.metadata import Distribution
from types import ModuleType, SimpleNamespace

import pytest

from streamrl.inference.servers.inside_vllm import streamrl_probing
from streamrl.inference.servers.inside_vllm.streamrl_probing import probe_name
from streamrl.inference.servers.vllm_launch import INSIDE

WHERE = "vllm.v1.core.sched"
KEY = "key-of-the-agent"


class Queue(deque[SimpleNamespace]):
    add_request = deque.append


class Scheduler:
    """vLLM's, as far as it matters."""

    def __init__(self) -> None:
        self.waiting = Queue()
        self.kv_holding_waiting = Queue()

    def _enqueue_waiting_request(self, request: SimpleNamespace) -> None:
        self.waiting.add_request(request)

    def add(self, name: str) -> None:
        self._enqueue_waiting_request(SimpleNamespace(request_id=name))

    def queues(self) -> tuple[list[str], list[str]]:
        """The ids that wait in the queue that is emptied first, and in the other."""
        first = [request.request_id for request in self.kv_holding_waiting]
        return first, [request.request_id for request in self.waiting]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> type[Scheduler]:
    for name in ("vllm", "vllm.v1", "vllm.v1.core", WHERE, f"{WHERE}.scheduler"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules[f"{WHERE}.scheduler"]
    monkeypatch.setattr(sys.modules[WHERE], "scheduler", module, raising=False)
    own = type("OwnScheduler", (Scheduler,), dict(Scheduler.__dict__))
    monkeypatch.setattr(module, "Scheduler", own, raising=False)
    monkeypatch.setattr(streamrl_probing, "admitted", False)
    monkeypatch.setenv("STREAMRL_AGENT_KEY", KEY)
    return own


def test_it_is_a_plugin_of_vllms_wherever_that_directory_is_on_the_path():
    found = {made.name: made for made in Distribution.discover(path=[str(INSIDE)])}
    (entry,) = found["streamrl-probing"].entry_points
    assert entry.group == "vllm.general_plugins"
    assert (INSIDE / f"{entry.module}.py").is_file()
    assert getattr(streamrl_probing, entry.attr) is streamrl_probing.admit


def test_a_probe_waits_in_the_queue_that_is_emptied_first(scheduler: type[Scheduler]):
    streamrl_probing.admit()
    queues = scheduler()
    probe = f"generate-tokens-{probe_name(KEY)}-1a2b-0f"
    for name in ("generate-tokens-1", probe, f"probe-{KEY}", f"{probe_name('another')}-1"):
        queues.add(name)
    first, others = queues.queues()
    assert first == [probe]
    assert others == ["generate-tokens-1", f"probe-{KEY}", f"{probe_name('another')}-1"]
    assert streamrl_probing.admitted


def test_it_changes_nothing_without_the_key_of_an_agent(
    scheduler: type[Scheduler], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STREAMRL_AGENT_KEY")
    streamrl_probing.admit()
    queues = scheduler()
    queues.add(probe_name(""))
    assert queues.queues() == ([], [probe_name("")]) and not streamrl_probing.admitted


def test_a_vllm_with_other_queues_runs_and_a_probe_is_not_admitted(
    scheduler: type[Scheduler], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys.modules[f"{WHERE}.scheduler"], "Scheduler", object)
    with caplog.at_level(logging.WARNING):
        streamrl_probing.admit()
    assert "has other queues" in caplog.text and not streamrl_probing.admitted
