"""What an agent does before vLLM is asked anything: a version from outside the store ends there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.errors import InferenceError, WeightError
from streamrl.inference import vllm_server
from streamrl.inference.vllm_host import VllmHost
from streamrl.records import PolicyVersion
from streamrl.weights.store import Store


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
    monkeypatch.setattr(vllm_server, "start", lambda *arguments: pytest.fail("vLLM was started"))
    host = VllmHost(run, "inference-0", 0, threading.Event())
    with pytest.raises(WeightError, match="refused"):
        host.load_version(
            PolicyVersion(
                learner="lead",
                version=1,
                **{**claim._asdict(), "uri": where.format(store=run.store)},
            )
        )
    assert host.url == "" and not (run.directory / "inference" / "inference-0" / "1").exists()


def test_before_vllm_is_up_there_are_no_metrics_of_it(tmp_path: Path):
    run = run_file.parse({"run": "r", "runs_dir": str(tmp_path), "envs": {"e": {}}})
    with pytest.raises(InferenceError, match="vLLM is not up yet"):
        VllmHost(run, "inference-0", 0, threading.Event()).vllm_metrics()
