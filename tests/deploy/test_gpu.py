"""deploy/gpu/acceptance.sh without a GPU: every program that it starts is a stand-in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from streamrl.config import run_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "gpu" / "acceptance.sh"
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
    "learn") echo "no loop"; exit 3 ;;
    *kernels*) printf 'attention cudnn\\t1.0 ms\\n' ;;
    *"bench.gpu run"*) printf '%s: steps\\t20\\n' "$4" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with the script, and with stand-ins for what it starts."""
    (tmp_path / "deploy" / "gpu").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "deploy" / "gpu")
    programs = tmp_path / "programs"
    for path in (
        programs / "make",
        *(tmp_path / ".venv/bin" / name for name in ("python", "streamrl")),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PROGRAM)
        path.chmod(0o755)
    smi = programs / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034 MiB, 580.82.07'\n")
    smi.chmod(0o755)
    return tmp_path


def accepted(clone: Path, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "deploy/gpu/acceptance.sh"],
        env={**os.environ, "PATH": path, "CALLS": str(clone / "calls")},
        capture_output=True,
        text=True,
    )


def test_one_table_has_every_step_and_what_it_measured(clone: Path):
    done = accepted(clone, f"{clone / 'programs'}:{os.environ['PATH']}")
    rows = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    assert rows[0] == ["GPU", "NVIDIA L4, 23034 MiB, 580.82.07"]
    results = dict(rows)
    assert results["set-up"].startswith("ok, ")
    assert results["attention cudnn"] == "1.0 ms"
    assert results["learn"].startswith("FAILED (3): no loop, ") and done.returncode == 1
    assert results["runs/qwen3-fast: steps"] == "20"
    calls = (clone / "calls").read_text()
    assert "make setup DEVICE=cuda\n" in calls and "learner.deterministic=false" in calls


def test_without_a_gpu_nothing_is_started(clone: Path):
    (clone / "programs" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    done = accepted(clone, f"{clone / 'programs'}:{os.environ['PATH']}")
    assert (done.returncode, done.stderr) == (1, "there is no NVIDIA GPU here\n")
    assert not (clone / "calls").exists()


def test_its_steps_end_within_25_minutes():
    text = SCRIPT.read_text()
    limits = [int(limit) for limit in re.findall(r"^step [\w-]+ (\d+) ", text, re.MULTILINE)]
    [twice] = re.findall(r'^    step "\$1" (\d+) ', text, re.MULTILINE)
    assert len(limits) == 5 and sum(limits) + 2 * int(twice) <= 25 * 60


def test_its_settings_of_a_run_can_be_set():
    settings = re.findall(r"--set ([^\s\"]+)", SCRIPT.read_text())
    chosen = [one.replace("$1", "r").replace("$2", "false") for one in settings]
    run = run_file.load(ROOT / "deploy" / "runs" / "qwen3-0.6b.yaml", chosen)
    assert run.orchestrator.max_steps == 20 and not run.learner.deterministic
