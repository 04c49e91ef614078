"""A pretrained model of 135 million parameters learns sums in words, as `make learn` has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.loop.runs import ROOT, live
from tests.support.waiting import patience

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_a_pretrained_model_passes_four_tenths_more_of_the_held_out_problems(tmp_path: Path):
    model = tmp_path / "smollm2"
    subprocess.run([sys.executable, "examples/smollm2.py", str(model)], cwd=ROOT, check=True)
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / "learn.yaml").read_text())
    settings["model"]["path"] = str(model)
    settings["orchestrator"]["max_wall_s"] = patience(2_700)
    with live(tmp_path, settings) as run:
        run.up()
        assert run.wait(3_000) == 0, run.said()
        run.nothing_left()
        passed = {each["version"]: each["pass@1"][0] for each in run.report()["evals"]["sums"]}
        assert passed[40] - passed[0] >= 0.4, passed
        audit = run.command("audit", str(run.file), timeout_s=300)
        assert audit.returncode == 0, audit.stdout + audit.stderr
