"""Ten kills of `make chaos`; kills of the broker alone; and the control: without transactions the
harness must find fault.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamrl.orchestrator.plan import BROKER
from tests.chaos import known
from tests.chaos.harness import struck
from tests.chaos.plan import Kill, plan
from tests.chaos.report import RETURN_LIMIT_S, report
from tests.chaos.verdict import verdict

KILLS, SEED = 10, 1


def said_of(
    directory: Path, kills: list[Kill] | None = None, logs: str = "transactions"
) -> dict[str, Any]:
    """The report on a run that is killed in this way; default: as `make chaos` does it."""
    run = known.run_file(directory)
    with struck(
        run, plan(KILLS, SEED, known.parts(run)) if kills is None else kills, SEED, logs
    ) as harness:
        said = report(SEED, harness.struck, verdict(harness.log, run))
    print(json.dumps(said, indent=1))
    return said


def test_ten_kills_lose_nothing_and_double_nothing(tmp_path: Path):
    said = said_of(tmp_path / "ten")
    assert {
        name: said[name] for name in ("lost", "trained_twice", "two_fates", "without_fate", "wrong")
    } == dict.fromkeys(("lost", "trained_twice", "two_fates", "without_fate", "wrong"), 0), said[
        "faults"
    ]
    assert said["audit_balanced"] and said["batches_identical"] and said["passed"]
    assert (
        said["kills"] == KILLS
        and said["broker_kills"] == 1
        and said["kills_by_role"].keys() == {"env", "buffer", "batcher", "learner"}
    )
    assert said["kills_in_open_transaction"] >= 6


def test_after_the_brokers_return_every_part_that_survived_commits_again(tmp_path: Path):
    """None of them is killed itself: those whose transaction fails leave and are started again, the
    others go on.
    """
    said = said_of(tmp_path / "returns", [Kill(BROKER, False, 0.3), Kill(BROKER, False, 0.1)])
    # two kills, five parts
    assert said["kills_by_role"] == {} and said["commit_after_broker_return_s"]["count"] == 10
    assert said["commit_after_broker_return_s"]["max"] <= RETURN_LIMIT_S
    assert said["passed"]


def test_without_transactions_the_harness_finds_fault(tmp_path: Path):
    """Its groups are in the log and its journal is not, whenever the buffer is killed: they come
    again, and are trained on again.
    """
    said = said_of(tmp_path / "control", [Kill("buffer", True, 0.2)] * 5, "no-transactions")
    assert said["trained_twice"] + said["two_fates"] > 0
    assert not said["audit_balanced"] and not said["batches_identical"] and not said["passed"]
    assert said["kills_in_open_transaction"] == 5
