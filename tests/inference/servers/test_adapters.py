"""Which adapters a server has, when they go, and that a server which ignores them is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.learner import Lora
from streamrl.inference.servers.adapters import (
    LoadedAdapters,
    arguments,
    refuse_other_base,
    refuse_other_shape,
)
from streamrl.inference.servers.engine import Engine
from streamrl.inference.servers.probe import ProbeTolerance
from streamrl.stream.records import AdapterBase, AdapterCheck, PolicyVersion, Probe
from streamrl.system.errors import InferenceError
from tests.inference.stub import Stub

TOKENS = np.array([1, 4, 8], np.uint16)
BY_THE_BASE = -TOKENS[1:].astype(np.float32) / 8


def adapters_line(running: str, waiting: str, time_s: float) -> str:
    labels = f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f'vllm:lora_requests_info{{max_lora="2",{labels}}} {time_s}\n'


class AdapterStub(Stub):
    """Knows which adapters it has. `applies`: with an adapter its logprobs are lower by 0.5."""

    applies = True
    breaks_probes = False

    def __init__(self) -> None:
        super().__init__("a")
        self.loaded: dict[str, str] = {}
        self.old = self.running = self.waiting = ""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.loaded:
                return 400, {"error": {"message": "it has already been loaded"}}
            self.loaded[body["lora_name"]] = body["lora_path"]
        if path == "/v1/unload_lora_adapter":
            del self.loaded[body["lora_name"]]
        if path == "/inference/v1/generate" and self.breaks_probes:
            return 500, {"error": {"message": "EngineCore encountered an issue"}}
        code, answer = super().answer(path, body)
        if path == "/inference/v1/generate" and body["model"] in self.loaded and self.applies:
            for entry in answer["prompt_logprobs"][1:]:
                for token in entry.values():
                    token["logprob"] -= 0.5
        return code, answer

    def metrics(self) -> str:
        """A line of earlier, and one of now."""
        return adapters_line(self.old, "", 1.7e9) + adapters_line(self.running, self.waiting, 1.8e9)


@pytest.fixture
def stub() -> Iterator[AdapterStub]:
    with AdapterStub() as server:
        yield server


@pytest.fixture
def loaded(stub: AdapterStub) -> LoadedAdapters:
    return LoadedAdapters(Engine(stub.url))


def copies(directory: Path, count: int) -> list[Path]:
    made = [directory / str(number) for number in range(count)]
    for copy in made:
        copy.mkdir(parents=True)
    return made


def check() -> AdapterCheck:
    probe = Probe(tokens=TOKENS, logprobs=BY_THE_BASE - np.float32(0.5))
    return AdapterCheck(uri="file:///w/check", size_bytes=1, sha256="ab", probe=probe)


def test_a_version_is_loaded_beside_the_others_under_a_name_of_its_own(
    stub: AdapterStub, loaded: LoadedAdapters, tmp_path: Path
):
    first, second = copies(tmp_path, 2)
    assert loaded.load(7, first, "own") == "policy-7-1@own"
    # loaded again after a probe that failed
    assert loaded.load(7, second, "own") == "policy-7-2@own"
    assert stub.loaded == {"policy-7-1@own": str(first), "policy-7-2@own": str(second)}
    assert not [path for path, _ in stub.asked if "pause" in path or "reset" in path]


def test_an_adapter_goes_when_no_request_uses_it(
    stub: AdapterStub, loaded: LoadedAdapters, tmp_path: Path
):
    paths = copies(tmp_path, 5)
    names = [loaded.load(version, path, "own") for version, path in enumerate(paths)]
    stub.old = names[2]
    stub.running = names[0]
    stub.waiting = names[1]
    loaded.unload_unused()
    assert list(stub.loaded) == [names[0], names[1], names[3], names[4]]
    assert [path.exists() for path in paths] == [True, True, False, True, True]
    stub.running = stub.waiting = ""
    loaded.unload_unused()
    assert list(stub.loaded) == names[3:]


def test_each_run_keeps_its_newest_adapters(
    stub: AdapterStub, loaded: LoadedAdapters, tmp_path: Path
):
    own, other = copies(tmp_path / "own", 1), copies(tmp_path / "other", 3)
    (name,) = [loaded.load(7, path, "own") for path in own]
    names = [loaded.load(version, path, "other") for version, path in enumerate(other, 7)]
    assert len({name, *names}) == 4, "version 7 of two runs has two names"
    loaded.unload_unused()
    assert list(stub.loaded) == [name, *names[1:]]


def base(sha256: str = "ab" * 32) -> AdapterBase:
    return AdapterBase(uri="file:///w/base", size_bytes=1, sha256=sha256, check=check())


def guest_version(of: AdapterBase | None) -> PolicyVersion:
    return PolicyVersion(
        learner="lead", version=1, uri="file:///w/1", size_bytes=1, sha256="0", base=of
    )


def test_another_runs_version_has_to_be_an_adapter_of_the_same_base():
    refuse_other_base(guest_version(base()), base())
    with pytest.raises(
        InferenceError, match=r"another base \(sha256 cdcdcdcdcdcd\) .* \(abababababab\)"
    ):
        refuse_other_base(guest_version(base("cd" * 32)), base())
    with pytest.raises(InferenceError, match=r"whole models, .* learner\.lora"):
        refuse_other_base(guest_version(None), base())


def test_another_runs_adapters_have_no_higher_rank_and_no_further_layers(tmp_path: Path):
    served = Lora(rank=4, targets=["q_proj", "v_proj"])

    def shape(rank: int, *targets: str) -> Path:
        config = {"r": rank, "target_modules": targets}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return tmp_path

    refuse_other_shape(shape(8, "v_proj"), served)
    with pytest.raises(InferenceError, match=r"have rank 9, and this server takes ranks up to 8:"):
        refuse_other_shape(shape(9, "v_proj"), served)
    with pytest.raises(InferenceError, match=r"change o_proj, .* adapters of q_proj, v_proj:"):
        refuse_other_shape(shape(4, "v_proj", "o_proj"), served)


def test_a_check_that_fails_can_be_made_again(
    stub: AdapterStub, loaded: LoadedAdapters, tmp_path: Path
):
    stub.breaks_probes = True
    with pytest.raises(InferenceError, match="EngineCore"):
        loaded.check(check(), tmp_path, tolerance=ProbeTolerance(1e-3))
    stub.breaks_probes = False
    loaded.check(check(), tmp_path, tolerance=ProbeTolerance(1e-3))


def test_a_server_that_applies_adapters_passes(
    stub: AdapterStub, loaded: LoadedAdapters, tmp_path: Path
):
    loaded.check(check(), tmp_path, tolerance=ProbeTolerance(1e-3))
    assert stub.loaded == {}


def test_a_server_that_ignores_adapters_is_refused(
    stub: AdapterStub, loaded: LoadedAdapters, tmp_path: Path
):
    stub.applies = False
    with pytest.raises(
        InferenceError,
        match=r"does not apply adapters .* off by up to 0\.5, in the mean by 0\.5, over 2",
    ):
        loaded.check(check(), tmp_path, tolerance=ProbeTolerance(1e-3))


def test_the_largest_rank_is_one_that_vllm_has():
    def of_rank(rank: int) -> list[str]:
        return arguments(Lora(rank=rank, targets=["q_proj", "down_proj"]), guests=2)

    assert of_rank(20) == [
        "--enable-lora",
        *("--max-lora-rank", "32"),
        *("--max-loras", "6"),
        *("--max-cpu-loras", "12"),
        *("--lora-target-modules", "q_proj", "down_proj"),
    ]
    assert of_rank(4)[2] == "8" and of_rank(512)[2] == "512"


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[1", "[" * 100_000])
def test_an_adapter_whose_settings_cannot_be_read_is_refused(tmp_path: Path, text: str):
    served = Lora(rank=4, targets=["q_proj"])
    with pytest.raises(InferenceError, match="adapter_config.json of its adapters cannot be read"):
        refuse_other_shape(tmp_path, served)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(InferenceError, match="adapter_config.json of its adapters cannot be read"):
        refuse_other_shape(tmp_path, served)
