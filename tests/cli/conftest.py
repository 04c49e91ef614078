from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def run_file(tmp_path: Path, run_name: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"run: {run_name}\nenvs: {{copy-digits: {{}}}}\nruns_dir: {tmp_path / 'runs'}\n"
    )
    return path
