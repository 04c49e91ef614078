"""What an agent does before vLLM is asked anything: a version from outside the store ends there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from streamrl.config import run_file
from streamrl.errors import InferenceError, WeightError
from streamrl.inference import vllm_process
from streamrl.inference.vllm_host import VllmHost
from streamrl.inference.vllm_launch import VllmLaunch
from streamrl.records import AdapterBase, AdapterCheck, PolicyVersion, Probe
from streamrl.weights.bases import BASE, CHECK, base_store
from streamrl.weights.store import Store
from tests.inference.test_adapters import BY_THE_BASE, TOKENS, AdapterStub


@pytest.mark.parametrize(
    "where",
    ["file:///etc", "{store}/../elsewhere", "{store}/lead/%2e%2e/elsewhere", "{store}/linked"],
)
def test_weights_from_outside_the_store_never_get_to_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    run = run_file.parse({"run": "r", "runs_dir": str(tmp_path), "envs": {"e": {}}})
    outside = Store(f"file://{tmp_path}/r/elsewhere")
    # right in size and hash
    claim = outside.put(1, lambda directory: directory.joinpath("config.json").write_text("{}"))
    (run.directory / "weights").mkdir()
    (run.directory / "weights" / "linked").symlink_to(claim.uri.removeprefix("file://"))
    monkeypatch.setattr(vllm_process, "start", lambda *arguments: pytest.fail("vLLM was started"))
    host = VllmHost(run, "inference-0", 0, threading.Event())
    with pytest.raises(WeightError, match="refused"):
        host.load_version(
            PolicyVersion(
                learner="lead",
                version=1,
                **{**claim._asdict(), "uri": where.format(store=run.store)},
            )
        )
    assert host.url == "" and not list(run.directory.glob("inference/inference-0/*/1"))


def test_before_vllm_is_up_there_are_no_metrics_of_it(tmp_path: Path):
    run = run_file.parse({"run": "r", "runs_dir": str(tmp_path), "envs": {"e": {}}})
    with pytest.raises(InferenceError, match="vLLM is not up yet"):
        VllmHost(run, "inference-0", 0, threading.Event()).vllm_metrics()


class Started(NamedTuple):
    """A vLLM that has been started: the stub."""

    url: str
    key: str = ""


def writes(text: str) -> Callable[[Path], None]:
    """Writes a model, or an adapter, that is nothing but a text."""

    def write(directory: Path) -> None:
        directory.joinpath("config.json").write_text("{}")
        shape = {"r": 4, "target_modules": ["q_proj"]}
        directory.joinpath("adapter_config.json").write_text(json.dumps(shape))
        directory.joinpath("adapter_model.safetensors").write_text(text)

    return write


def adapter(run: run_file.RunFile, version: int, model: str = "a model") -> PolicyVersion:
    """A version in the run's store, which lowers logprobs by 0.5, as the stub does."""
    probe = Probe(tokens=TOKENS, logprobs=BY_THE_BASE - np.float32(0.5))
    bases = base_store(run.store)
    base = bases.put(BASE, writes(model))
    check = bases.put(CHECK, writes(f"check of {run.run}"))
    stored = Store(run.store).put(version, writes(f"{run.run}, version {version}"))
    return PolicyVersion(
        learner="lead",
        version=version,
        probe=probe,
        base=AdapterBase(**base._asdict(), check=AdapterCheck(**check._asdict(), probe=probe)),
        **stored._asdict(),
    )


def test_the_adapters_of_two_runs_stand_on_one_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = run_file.parse(
        {
            "run": "own",
            "runs_dir": str(tmp_path),
            "envs": {"e": {}},
            "learner": {"lora": {"rank": 4}},
            "inference": {"also_serves": ["second"]},
        }
    )
    second = run.model_copy(update={"run": "second"})
    started: list[str] = []

    with AdapterStub() as stub:

        def start(launch: VllmLaunch, stop: threading.Event) -> Started:
            started.append(launch.model.joinpath("adapter_model.safetensors").read_text())
            return Started(stub.url)

        monkeypatch.setattr(vllm_process, "start", start)
        host = VllmHost(run, "inference-0", 0, threading.Event())
        own = host.load_version(adapter(run, 7))
        other = host.load_version(adapter(second, 7), "second")
        assert started == ["a model"], "one vLLM"
        assert (own.model, other.model) == ("policy-7-1", "policy-7-2")
        assert own.mismatch.max_abs < 1e-6 and other.mismatch.max_abs < 1e-6
        assert other.swap is not None and other.swap.pause_s == 0.0
        texts = [
            Path(path, "adapter_model.safetensors").read_text() for path in stub.loaded.values()
        ]
        assert texts == ["own, version 7", "second, version 7"]
        checks = [
            body["lora_path"]
            for path, body in stub.asked
            if body and body.get("lora_name") == "check" and "lora_path" in body
        ]
        assert len(checks) == 2, "each run's adapters have a shape of their own"

        # A run that has the name of a copy, which is deleted once newer versions are there.
        like_a_copy = run.model_copy(update={"run": "7-1"})
        host.load_version(adapter(like_a_copy, 1), "7-1")
        for version in (8, 9, 10):
            host.load_version(adapter(run, version))
        assert len(stub.loaded) == 4
        assert all(Path(path, "config.json").exists() for path in stub.loaded.values())

        with pytest.raises(InferenceError, match="another base"):
            host.load_version(adapter(second, 8, "another model"), "second")
        with pytest.raises(WeightError, match="not a version in the configured store"):
            host.load_version(adapter(run, 8), "second")
        stub.applies = False
        third = run.model_copy(update={"run": "third"})
        with pytest.raises(InferenceError, match="does not apply adapters"):
            host.load_version(adapter(third, 0), "third")
