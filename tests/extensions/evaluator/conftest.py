from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.evaluator import process, runner, show
from streamrl.inference.servers import vllm_host
from streamrl.stream.log.memory import MemoryLog
from tests.extensions.evaluator.world import PROBLEMS, SAMPLES, FakeClient, FakeHost, World


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "version": -1,
        "served": [],
        "alive": True,
        "doubtful": (),
        "spoilt": (),
        "hang": False,
        "stopped": 0,
        "guests": [],
    }.items():
        monkeypatch.setattr(World, name, value, raising=False)
    monkeypatch.setattr(runner, "Client", FakeClient)
    monkeypatch.setattr(vllm_host, "VllmHost", FakeHost)
    for module in (process, show):
        monkeypatch.setattr(module, "check_vllm", lambda settings: None)


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    evaluations = {
        "every": 2,
        "envs": {
            "held": {"env": "copy-digits", "problems": PROBLEMS, "samples": SAMPLES, "k": [1, 2]}
        },
    }
    return parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "envs": {"copy-digits": {"params": {"digits": 1}}},
            "eval": evaluations,
        }
    )


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(
        dict.fromkeys(("policy-versions", "evals", "metrics", "rollouts.copy-digits"), 1)
    )
