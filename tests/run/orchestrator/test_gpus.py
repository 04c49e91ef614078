from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.run.orchestrator.gpus import Gpu, installed_gpus


def test_gpus_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second has unified memory, whose size is not reported."""
    program = tmp_path / "nvidia-smi"
    lines = ("24576, 580.82.07, NVIDIA L4", "[N/A], 580.82.07, NVIDIA GB10")
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_gpus() == [
        Gpu(24.0, "580.82.07", "NVIDIA L4"),
        Gpu(0.0, "580.82.07", "NVIDIA GB10"),
    ]
    program.write_text("#!/bin/sh\nexit 9\n")  # the driver does not answer
    assert installed_gpus() == []
    monkeypatch.setenv("PATH", "")
    assert installed_gpus() == []
