"""Multiple choice, coding and demonstrations from end to end, for a policy that knows nothing: what
it says arrives, is judged, trains, and is accounted for; so is what it is shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import topology
from streamrl.extensions.recordings.audit import audit
from streamrl.stream.local_kafka import connect
from streamrl.stream.records import Rollout
from tests.loop.runs import live

SETTINGS = {
    "run": "others",
    "envs": {
        "multiple-choice": {"fraction": 0.4, "max_tokens": 2},
        "coding": {"fraction": 0.4, "max_tokens": 4, "params": {"timeout_s": 60}},
        "demonstrations": {
            "fraction": 0.2,
            "loss": {"policy_gradient": 0, "cross_entropy": 1},
            "buffer": {"group_size": 1, "min_group_size": 1},
        },
    },
    "buffer": {"group_size": 8, "min_group_size": 4, "max_age": 4},
    "batcher": {"total_token_budget": 4096, "max_seq_len": 192, "lookahead": 1},
    "model": {"max_seq_len": 192, "tiny": {"chat": "turns", "alphabet": "0123456789+=?ABCD"}},
    "inference": {"max_model_len": 192},
    "orchestrator": {"max_steps": 6},
}


SHOWN = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


def with_demonstrations(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    file.write_text(json.dumps({"messages": SHOWN}) + "\n")
    envs = settings["envs"]
    shown = {**envs["demonstrations"], "params": {"file": str(file)}}
    return {**settings, "envs": {**envs, "demonstrations": shown}}


def likelihoods(rollouts: list[Rollout]) -> dict[int, float]:
    """How probable what it is shown was to each version of the policy."""
    found: dict[int, float] = {}
    for rollout in rollouts:
        (answer,) = [turn for turn in rollout.turns if turn.role == "assistant"]
        assert answer.message == "3" and answer.inference_metadata is not None
        (span,) = answer.inference_metadata.version_spans
        found[span.version] = rollout.rewards["likelihood"]
    return found


@pytest.mark.live
@pytest.mark.slow
def test_choices_and_programs_are_judged_and_accounted_for(tmp_path: Path):
    with live(tmp_path, with_demonstrations(SETTINGS, tmp_path / "shown.jsonl")) as run:
        run.up()
        assert run.wait(900) == 0, run.said()
        run.nothing_left()
        with connect.connect_or_start(run.run):
            account = audit(run.log(), run.run)
            made = {
                env: [
                    r
                    for r in run.records(topology.rollouts(env), "rollout")
                    if isinstance(r, Rollout)
                ]
                for env in run.run.envs
            }
        print(run.report()["envs"], {env: len(rollouts) for env, rollouts in made.items()})
    assert account.balanced, account.problems
    assert not [
        rollout.failure for rollouts in made.values() for rollout in rollouts if rollout.failure
    ]
    # some letters are right by chance
    assert {rollout.rewards["correct"] for rollout in made["multiple-choice"]} == {0.0, 1.0}
    ran = [rollout.rewards["ran"] for rollout in made["coding"]]
    # `12` is a program, `1=` is none
    assert set(ran) == {0.0, 1.0} and all("passed" in rollout.rewards for rollout in made["coding"])
    by_version = likelihoods(made["demonstrations"])
    assert by_version[max(by_version)] > by_version[min(by_version)]
    batched = [env["batched"] for env in run.report()["envs"].values()]
    assert all(count > 0 for count in batched)
