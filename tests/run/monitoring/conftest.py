from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.run_file import RunFile
from tests.support import data_path


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return data_path.RUN.model_copy(update={"runs_dir": str(tmp_path)})
