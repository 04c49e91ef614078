"""The plugin inside vLLM: found as one, and what version spans say with it."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import Distribution
from types import ModuleType

import pytest

from streamrl.inference.servers.inside_vllm import streamrl_adapters
from streamrl.inference.servers.vllm_launch import INSIDE

WHERE = "vllm.v1.engine"


class RequestState:
    """vLLM's class of that name, as far as it matters."""

    def __init__(self, lora_name: str | None) -> None:
        self.lora_name = lora_name
        self.said = ""

    def track_weight_version(self, weight_version: str) -> None:
        self.said = weight_version


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> type[RequestState]:
    for name in ("vllm", "vllm.v1", WHERE, f"{WHERE}.output_processor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules[f"{WHERE}.output_processor"]
    own = type("RequestState", (RequestState,), {})
    monkeypatch.setattr(sys.modules[WHERE], "output_processor", module, raising=False)
    monkeypatch.setattr(module, "RequestState", own, raising=False)
    monkeypatch.setenv("STREAMRL_ADAPTERS", "1")
    return own


def said(state: type[RequestState], lora_name: str | None) -> str:
    request = state(lora_name)
    request.track_weight_version("default")
    return request.said


def test_it_is_a_plugin_of_vllms_wherever_that_directory_is_on_the_path():
    found = {made.name: made for made in Distribution.discover(path=[str(INSIDE)])}
    (entry,) = found["streamrl-adapters"].entry_points
    assert entry.group == "vllm.general_plugins"
    assert (INSIDE / f"{entry.module}.py").is_file()
    assert getattr(streamrl_adapters, entry.attr) is streamrl_adapters.label


def test_a_span_names_the_version_of_the_adapter(state: type[RequestState]):
    streamrl_adapters.label()
    assert said(state, "policy-12-3@first") == "12"


@pytest.mark.parametrize("name", [None, "check", "policy-12", "policy-12@first"])
def test_what_is_no_version_keeps_a_label_that_no_client_takes_for_one(
    state: type[RequestState], name: str | None
):
    streamrl_adapters.label()
    assert said(state, name) == "default"


def test_without_adapters_it_changes_nothing(
    state: type[RequestState], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STREAMRL_ADAPTERS")
    streamrl_adapters.label()
    assert said(state, "policy-12-3@first") == "default"


def test_a_vllm_that_marks_tokens_in_another_way_runs_and_says_so(
    state: type[RequestState], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delattr(RequestState, "track_weight_version")
    with caplog.at_level(logging.WARNING):
        streamrl_adapters.label()
    assert "its answers name no version" in caplog.text
