"""The wheel from the first command to the first reward, in a directory that has no sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.wheels import ROOT, build_wheel, call, install_wheel

REACHED = "orchestrator.target={env: copy-digits, reward: 0.3, batches: 3}"


@pytest.mark.live
def test_an_installed_wheel_learns_from_a_new_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install_wheel(build_wheel(tmp_path / "dist"), tmp_path / "env", "learner,broker")
    # Kafka's jars and vLLM's environment are not part of the wheel.
    monkeypatch.setenv("STREAMRL_HOME", str(ROOT / ".streamrl"))
    vllm = f"inference.python={ROOT / '.venv-inference' / 'bin' / 'python'}"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    work = tmp_path / "work"
    work.mkdir()
    streamrl = tmp_path / "env" / "bin" / "streamrl"
    call(streamrl, "new", "demo", cwd=work)
    assert "learner, inference-0" in call(streamrl, "check", "demo.yaml", cwd=work)
    call(streamrl, "up", "demo.yaml", "--set", vllm, "--set", REACHED, cwd=work, limit_s=600)
    report = json.loads((work / "runs" / "demo" / "report.json").read_text())
    assert report["time_to_target_s"] is not None
    assert "balanced" in call(streamrl, "audit", "demo", cwd=work)
