"""A rolling restart: every part of a run is asked to end and started again, one after another,
twice, while the others go on. Nothing is lost.
"""

from __future__ import annotations

from pathlib import Path

from tests.chaos import known
from tests.chaos.harness import at_work
from tests.chaos.report import report
from tests.chaos.verdict import verdict

ROUNDS = 2


def test_every_part_is_restarted_in_turn_and_nothing_is_lost(tmp_path: Path):
    run = known.run_file(tmp_path / "rolling")
    with at_work(run) as harness:
        harness.until(harness.everybody_works, "every part has committed")
        codes = [(name, harness.restart(name)) for _ in range(ROUNDS) for name in known.parts(run)]
        # each ended as it was asked to, in time
        assert codes == [(name, 0) for _ in range(ROUNDS) for name in known.parts(run)]
        harness.drain()
        said = report(0, harness.struck, verdict(harness.log, run))
    assert said["passed"] and said["audit_balanced"] and said["batches_identical"], said["faults"]
    assert (
        said["kills"] == 0
        and said["lost"]
        == said["trained_twice"]
        == said["two_fates"]
        == said["without_fate"]
        == said["wrong"]
        == 0
    )
    assert said["batches"] > ROUNDS and said["versions"] == said["batches"] + 1
