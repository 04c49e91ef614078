from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.config.sections.batches import Batcher

QUICKSTART = Path(__file__).parents[3] / "deploy" / "runs" / "quickstart.yaml"


def test_rows_are_a_multiple_of_the_processes():
    """2560 tokens and a tenth more in rows of 64 are 44, and one."""
    assert [
        run_file.load(QUICKSTART, [f"batcher.processes={n}"]).batcher.rows for n in (1, 2, 33)
    ] == [45, 46, 66]


@pytest.mark.parametrize(("budget", "length", "rows"), [(2560, 64, 45), (16_384, 2048, 10)])
def test_rows_hold_the_budget_and_a_tenth_more(budget: int, length: int, rows: int):
    assert Batcher(total_token_budget=budget, max_seq_len=length).rows == rows
