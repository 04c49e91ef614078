"""A short `make soak` with fewer producers: the same is done to it, the same account is made. How
fast it is does not matter here.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.soak import known
from tests.soak.harness import soaked
from tests.soak.report import report
from tests.soak.verdict import verdict

SECONDS = 12.0
ENVS = 12


def test_a_short_soak_loses_nothing(tmp_path: Path):
    run = known.run_file(tmp_path / "soak", ENVS)
    with soaked(run, SECONDS) as (soak, log):
        said = report(run, soak.seen, soak.steps(), verdict(log, run))
    print(json.dumps(said, indent=1))
    assert said["accounts_clean"], said["faults"]
    assert (
        said["good_without_one_fate"]
        == said["rubbish_not_dead_lettered"]
        == said["lost"]
        == said["trained_twice"]
        == said["wrong"]
        == 0
    )
    assert (
        said["rubbish"] == said["rubbish_dead_lettered"] > 0
        and said["audit_balanced"]
        and said["batches_identical"]
    )
    assert (
        said["broker_kills"] == 2 and "is full: v" in said["learner_said"] and said["batches"] > 6
    )
    # that it is flat, half an hour must show
    assert {one["process"] for one in said["memory"]} == {*known.parts(run), "broker (Kafka)"}
