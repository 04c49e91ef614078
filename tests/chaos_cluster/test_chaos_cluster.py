"""Two kills of `make chaos-cluster`, and what its table finds fault with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos_cluster.harness import CONTROL, WRITERS, Row, at_work
from tests.chaos_cluster.report import Outcome, kept_s, misses, outcome
from tests.support.waiting import patience

WELL = Outcome(rollouts=80, batches=2, lost=0, doubled=0, balanced=True, trained=[10, 25])


def row(part_s: float, control_s: float, **others: object) -> Row:
    gaps = {**dict.fromkeys(WRITERS, 1.0), WRITERS[1]: part_s, CONTROL: control_s}
    return replace(Row("kill", 1, gaps_s=gaps), **others)


def test_a_gap_counts_beyond_that_of_a_plain_producer():
    assert misses([row(14.9, 12.0)], WELL) == []
    assert misses([row(15.5, 12.0)], WELL) == ["kill: 3.5 s longer than a plain producer"]


def test_what_is_lost_or_ends_in_a_rolling_restart_is_found():
    assert misses([row(1, 1, sampled_again=2)], WELL) == ["kill: 2 answers were sampled again"]
    ends = row(1, 1, fault="rolling restart", ends=["buffer 75"])
    assert misses([ends], WELL) == ["rolling restart: buffer 75"]
    assert misses([row(1, 1, ends=["buffer -9"])], WELL) == []
    for found in (replace(WELL, lost=1), replace(WELL, doubled=1), replace(WELL, balanced=False)):
        assert len(misses([], found)) == 1


def test_what_is_not_trained_on_yet_is_kept():
    """40 answers of 0.2 s, of which the batches before version 1 have 10."""
    assert kept_s(row(1, 1, answers=40, version=1), WELL) == pytest.approx(6.0)
    assert kept_s(row(1, 1, answers=40, version=0), WELL) == pytest.approx(8.0)


@pytest.mark.slow
def test_a_killed_leader_and_a_killed_controller_cost_a_run_nothing_but_time(tmp_path: Path):
    with at_work(tmp_path) as harness:
        rows = [harness.kill_leader("batches"), harness.kill_controller()]
        harness.drain()
        found = outcome(harness.log, harness.run)
    assert found.passed, found
    assert [(r.ends, r.sampled_again) for r in rows] == [([], 0), ([], 0)]
    assert max(r.excess_s for r in rows) <= patience(15.0), rows
