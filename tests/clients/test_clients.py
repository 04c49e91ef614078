"""Other people's SDKs through a live gateway: `make clients`, without what npm installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.__main__ import played
from tests.clients.programs import PROGRAMS, PYTHON

SDKS = tuple(name for name, program in PROGRAMS.items() if program.tool == "add")[1:]


@pytest.mark.slow
@pytest.mark.live
def test_sdks_in_python_continue_token_for_token_and_are_trained_on(tmp_path: Path):
    assert PYTHON.exists(), "make test-all installs it"
    rows = played(SDKS, tmp_path)
    assert [row.client for row in rows] == list(SDKS)
    assert all(row.is_clean for row in rows), rows
