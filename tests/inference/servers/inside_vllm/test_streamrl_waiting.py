"""The plugin inside vLLM: found as one, and what it changes there."""

from __future__ import annotations

import logging
import sys
import time
from importlib.metadata import Distribution
from types import ModuleType

import pytest

from streamrl.inference.servers.inside_vllm import streamrl_waiting
from streamrl.inference.servers.vllm_launch import INSIDE

WHERE = "vllm.distributed.device_communicators"


@pytest.fixture
def shm_broadcast(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's module of that name, as far as it matters."""
    for name in ("vllm", "vllm.distributed", WHERE, f"{WHERE}.shm_broadcast"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules[f"{WHERE}.shm_broadcast"]
    monkeypatch.setattr(sys.modules[WHERE], "shm_broadcast", module, raising=False)
    monkeypatch.setattr(module, "sched_yield", "vLLM's own", raising=False)
    return module


def test_it_is_a_plugin_of_vllms_wherever_that_directory_is_on_the_path():
    found = {made.name: made for made in Distribution.discover(path=[str(INSIDE)])}
    (entry,) = found["streamrl-waiting"].entry_points
    assert entry.group == "vllm.general_plugins"
    assert (INSIDE / f"{entry.module}.py").is_file() and getattr(
        streamrl_waiting, entry.attr
    ) is streamrl_waiting.nap


def test_who_waits_sleeps(shm_broadcast: ModuleType, monkeypatch: pytest.MonkeyPatch):
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("STREAMRL_NAP_S", "0.25")
    streamrl_waiting.nap()
    shm_broadcast.sched_yield()
    assert slept == [0.25]


@pytest.mark.parametrize("said", ["", "0", None])
def test_it_changes_nothing_where_it_is_not_asked_to(
    shm_broadcast: ModuleType, said: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STREAMRL_NAP_S", raising=False)
    if said is not None:
        monkeypatch.setenv("STREAMRL_NAP_S", said)
    streamrl_waiting.nap()
    assert shm_broadcast.sched_yield == "vLLM's own"


def test_a_vllm_that_waits_in_another_way_runs_and_says_so(
    shm_broadcast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delattr(shm_broadcast, "sched_yield")
    monkeypatch.setenv("STREAMRL_NAP_S", "0.25")
    with caplog.at_level(logging.WARNING):
        streamrl_waiting.nap()
    assert "waits in another way" in caplog.text and not hasattr(shm_broadcast, "sched_yield")
