"""Six kills of `make chaos`, then a rolling restart; and the control: without transactions the
harness must find fault.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from streamrl.run.orchestrator.plan import BROKER
from tests.chaos import known
from tests.chaos.harness import Harness, at_work, struck
from tests.chaos.plan import Kill, plan
from tests.chaos.report import RETURN_LIMIT_S, report
from tests.chaos.verdict import verdict

KILLS = 6
SEED = 1


def said_of(harness: Harness) -> dict[str, Any]:
    """The report on a run that has come to rest."""
    said = report(SEED, harness.struck, verdict(harness.log, harness.run))
    print(json.dumps(said, indent=1))
    return said


def test_kills_and_a_rolling_restart_lose_nothing_and_double_nothing(tmp_path: Path):
    """The broker is killed first, when no part has been: those whose transaction fails leave and
    are started again, the others go on. Then six kills as `make chaos` does them. At last every
    part is asked to end and started again, one after another, while the others go on.
    """
    run = known.run_file(tmp_path / "six")
    parts = known.parts(run)
    draw = Random(SEED)
    with at_work(run) as harness:
        for kill in [Kill(BROKER, False, 0.3), *plan(KILLS, SEED, parts)]:
            harness.kill(kill, draw)
        codes = [(name, harness.restart(name)) for name in parts]
        harness.drain()
        said = said_of(harness)
    # each ended as it was asked to, in time
    assert codes == [(name, 0) for name in parts]
    assert {
        name: said[name] for name in ("lost", "trained_twice", "two_fates", "without_fate", "wrong")
    } == dict.fromkeys(("lost", "trained_twice", "two_fates", "without_fate", "wrong"), 0), said[
        "faults"
    ]
    assert said["audit_balanced"] and said["batches_identical"] and said["passed"]
    assert said["versions"] == said["batches"] + 1
    assert said["kills"] == KILLS + 1 and said["broker_kills"] == 2
    assert said["kills_by_role"].keys() == {"env", "buffer", "batcher", "learner"}
    assert said["kills_in_open_transaction"] >= 4
    # after the broker's return every part commits again
    assert said["commit_after_broker_return_s"]["count"] == 2 * len(parts)
    assert said["commit_after_broker_return_s"]["max"] <= RETURN_LIMIT_S


def test_without_transactions_the_harness_finds_fault(tmp_path: Path):
    """Its groups are in the log and its journal is not, whenever the buffer is killed: they come
    again, and are trained on again.
    """
    kills = [Kill("buffer-0", True, 0.2)] * 2
    with struck(known.run_file(tmp_path / "control"), kills, SEED, "no-transactions") as harness:
        said = said_of(harness)
    assert said["trained_twice"] + said["two_fates"] > 0
    assert not said["audit_balanced"] and not said["batches_identical"] and not said["passed"]
    assert said["kills_in_open_transaction"] == len(kills)
