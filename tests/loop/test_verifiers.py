"""Environments of verifiers learned live, by the run file that ships: one of each sort, with the
server's own logprobs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from streamrl.config import topology
from streamrl.local_kafka import connect
from streamrl.recordings.audit import audit
from streamrl.records import Rollout
from tests.loop.runs import ROOT, Live, live


def good(run: Live, env: str) -> list[Rollout]:
    return [
        record
        for record in run.records(topology.rollouts(env), "rollout")
        if isinstance(record, Rollout) and not record.failure
    ]


@pytest.mark.live
@pytest.mark.slow
def test_one_of_each_sort_is_learned_token_for_token(tmp_path: Path):
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / "verifiers.yaml").read_text())
    with live(tmp_path, settings) as run:
        run.up()
        ended = run.wait(1500)
        report = run.report()
        print(
            f"exit {ended}, {report['steps']} steps in {report['wall_s']:.0f} s, logprobs off by"
            f" {report['logprob_mismatch_max_abs']}"
        )
        print(
            {
                name: (env["reward_mean_first20"], env["reward_mean_last20"])
                for name, env in report["envs"].items()
            }
        )
        assert ended == 0, run.said()
        for env in report["envs"].values():
            assert env["reward_mean_last20"] > env["reward_mean_first20"] + 0.05, run.said()
        assert report["logprob_mismatch_max_abs"] <= 1e-4
        run.nothing_left()
        with connect.connect_or_start(run.run):
            account = audit(run.log(), run.run)
            assert account.balanced, account.problems
            made = {name: good(run, name) for name in settings["envs"]}
    names = {
        name: {reward for rollout in found for reward in rollout.rewards}
        for name, found in made.items()
    }
    assert names["copy"] == {"rubric", "first", "exact", "num_turns"}
    assert {"rubric", "called", "answered", "secret_calls"} <= names["look-up"]
    assert any(rollout.rewards["secret_calls"] for rollout in made["look-up"])
    assert not any(
        turn.fork for found in made.values() for rollout in found for turn in rollout.turns
    )
    assert {len(rollout.turns) for rollout in made["guess"]} == {2, 4, 6}
    logprobs = [
        value
        for found in made.values()
        for r in found
        for t in r.turns
        if t.logprobs is not None
        for value in t.logprobs.tolist()
    ]
    assert sum(value == 0 for value in logprobs) < len(logprobs) / 10
