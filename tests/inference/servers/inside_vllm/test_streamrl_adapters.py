"""The plugins inside vLLM: what version spans say with them, and what computes experts."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from types import ModuleType, SimpleNamespace

import pytest

from streamrl.inference.servers.inside_vllm import streamrl_adapters
from streamrl.inference.servers.vllm_launch import INSIDE

WHERE = "vllm.v1.engine"
EXPERTS = "vllm.model_executor.layers.fused_moe"


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


@dataclass
class FusedMoEConfig:
    """vLLM's class of that name, as far as it matters."""

    is_lora_enabled: bool = False
    kernel: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.kernel = "Triton" if self.is_lora_enabled else "CPU"


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> type[FusedMoEConfig]:
    parts = EXPERTS.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    own = type("FusedMoEConfig", (FusedMoEConfig,), {})
    config = SimpleNamespace(FusedMoEConfig=own)
    monkeypatch.setattr(sys.modules[EXPERTS], "config", config, raising=False)
    monkeypatch.setenv("STREAMRL_ADAPTERS", "1")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    return own


def test_they_are_plugins_of_vllms_wherever_that_directory_is_on_the_path():
    found = {made.name: made for made in Distribution.discover(path=[str(INSIDE)])}
    entries = found["streamrl-adapters"].entry_points
    assert {entry.group for entry in entries} == {"vllm.general_plugins"}
    assert {entry.module for entry in entries} == {"streamrl_adapters"}
    called = [getattr(streamrl_adapters, entry.attr) for entry in entries]
    assert called == [streamrl_adapters.label, streamrl_adapters.keep_cpu_experts]


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


def test_a_cpu_computes_experts_as_without_adapters(experts: type[FusedMoEConfig]):
    streamrl_adapters.keep_cpu_experts()
    assert experts(is_lora_enabled=True).kernel == "CPU"


@pytest.mark.parametrize(
    ("variable", "value"), [("STREAMRL_ADAPTERS", ""), ("VLLM_TARGET_DEVICE", "cuda")]
)
def test_without_adapters_and_on_a_gpu_vllm_chooses_the_kernel_of_experts(
    variable: str, value: str, experts: type[FusedMoEConfig], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable, value)
    streamrl_adapters.keep_cpu_experts()
    assert experts(is_lora_enabled=True).kernel == "Triton"


def test_a_vllm_that_chooses_the_kernel_of_experts_in_another_way_runs_and_says_so(
    experts: type[FusedMoEConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delattr(FusedMoEConfig, "is_lora_enabled")
    with caplog.at_level(logging.WARNING):
        streamrl_adapters.keep_cpu_experts()
    assert "chooses the kernel of experts in another way" in caplog.text
