"""The plugin inside vLLM: found as one, and how vLLM then starts its processes. Whether that serves
is for test_live.py.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import Distribution
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from streamrl.inference.servers.inside_vllm import streamrl_forking
from streamrl.inference.servers.inside_vllm.streamrl_forking import METHOD
from streamrl.inference.servers.vllm_launch import INSIDE


class CpuPlatform:
    """What vLLM's own does."""

    @classmethod
    def check_and_update_config(cls, config: Any) -> None:
        config.parallel_config.distributed_executor_backend = "mp"
        os.environ[METHOD] = "spawn"


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> type:
    for name in ("vllm", "vllm.platforms", "vllm.platforms.cpu"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    own = type("CpuPlatform", (CpuPlatform,), {})
    monkeypatch.setattr(sys.modules["vllm.platforms.cpu"], "CpuPlatform", own, raising=False)
    monkeypatch.setenv(METHOD, "unset")
    return own


def started(platform: Any, backend: str) -> tuple[str, str]:
    """How vLLM starts its engine, and what computes."""
    parallel = SimpleNamespace(distributed_executor_backend=backend)
    platform.check_and_update_config(SimpleNamespace(parallel_config=parallel))
    return os.environ[METHOD], parallel.distributed_executor_backend


def test_it_is_a_plugin_of_vllms_wherever_that_directory_is_on_the_path():
    found = {made.name: made for made in Distribution.discover(path=[str(INSIDE)])}
    (entry,) = found["streamrl-forking"].entry_points
    assert entry.group == "vllm.general_plugins"
    assert (INSIDE / f"{entry.module}.py").is_file() and getattr(
        streamrl_forking, entry.attr
    ) is streamrl_forking.fork


def test_an_engine_with_one_device_is_a_fork_that_computes(
    platform: type, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STREAMRL_FORK", "1")
    streamrl_forking.fork()
    assert started(platform, "uni") == ("fork", "uni")


def test_with_several_devices_vllm_does_as_it_does(platform: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_FORK", "1")
    streamrl_forking.fork()
    assert started(platform, "mp") == ("spawn", "mp")


@pytest.mark.parametrize("said", ["", "0", None])
def test_it_changes_nothing_where_it_is_not_asked_to(
    platform: type, said: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STREAMRL_FORK", raising=False)
    if said is not None:
        monkeypatch.setenv("STREAMRL_FORK", said)
    streamrl_forking.fork()
    assert started(platform, "uni") == ("spawn", "mp")


def test_a_vllm_that_starts_in_another_way_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, platform: type, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys.modules["vllm.platforms.cpu"], "CpuPlatform", object)
    monkeypatch.setenv("STREAMRL_FORK", "1")
    with caplog.at_level(logging.WARNING):
        streamrl_forking.fork()
    assert "starts its processes in another way" in caplog.text
