from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def planned(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What make would do from a fresh clone, without doing it."""
    command = ["make", "--dry-run", "--always-make", "setup", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", ["main", "inference"]), ("cuda", ["main", "learner-gpu", "inference-gpu"])],
)
def test_the_set_up_installs_what_the_device_needs(device: str, expected: list[str]):
    lines = planned(f"DEVICE={device}").stdout.splitlines()
    lists = [
        line.split("requirements/")[1].removesuffix(".txt")
        for line in lines
        if "uv pip" in line and "requirements/" in line
    ]
    assert lists == expected
    assert f"echo {device} > .streamrl/.device" in lines


def test_an_unknown_device_is_refused():
    assert "DEVICE is tpu; it can be cpu or cuda" in planned("DEVICE=tpu").stderr


def programs(*targets: str) -> set[str]:
    """The modules under tests/ and bench/ that these targets run."""
    command = ["make", "--dry-run", *targets]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {word for word in shown.split() if word.startswith(("tests.", "bench."))}


def test_every_proof_and_measurement_is_a_program():
    names = programs(
        "chaos",
        "chaos-cluster",
        "clients",
        "thousand-envs",
        "soak",
        "bench",
        "bench-loop",
        "bench-smoke",
    )
    assert names >= {"tests.chaos", "tests.thousand_envs", "bench.data_path", "bench.smoke"}
    for name in names:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_the_help_lists_a_dozen_targets():
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(shown.partition("\n\n")[0].splitlines()) == 12
