"""One live run with many envs: shipped ones, tasks of reasoning-gym, one from a file, one from
outside. Every part is stopped once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config import topology
from streamrl.stream.records import Fate, PolicyVersion, Rollout
from streamrl.stream.records.compact import wide_logprobs
from streamrl.weights.pull import pull
from tests.loop.runs import ROOT, Live, any_part, live
from tests.support import go
from tests.support.parity import learner_logprobs
from tests.support.waiting import patience

OUTSIDE = "outside"
LENGTH = 256
GYM = {
    "chain-sum": {
        "task": "chain_sum",
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
    },
    "letter-counting": {"task": "letter_counting", "min_words": 1, "max_words": 2},
    "lcm": {"task": "lcm"},
}
SETTINGS: dict[str, Any] = {
    "run": "many",
    "envs": {
        "copy-digits": {"fraction": 0.2, "max_tokens": 3},
        **{
            # the tiny model has no room for a system prompt
            name: {
                "kind": "reasoning-gym",
                "params": {**params, "answer": "whole"},
                "fraction": 0.1,
                "max_tokens": 8,
            }
            for name, params in GYM.items()
        },
        "reverse": {
            "kind": "examples/reverse_digits.py:ReverseDigits",
            "fraction": 0.1,
            "max_tokens": 4,
            "temperature": 0.7,
        },
        OUTSIDE: {"replicas": 0},
    },
    "buffer": {"group_size": 4, "min_group_size": 2, "max_age": 2},
    "batcher": {"total_token_budget": 6000, "max_seq_len": LENGTH, "lookahead": 1},
    "model": {
        "max_seq_len": LENGTH,
        "tiny": {"alphabet": "".join(map(chr, range(32, 127))) + "\n"},
    },
    "learner": {"checkpoint_every": 5},
    "weights": {"keep_versions": 100_000},
    "inference": {"max_model_len": LENGTH},
}
# Stopped together: one by one the parts are killed in test_quickstart, and inference as well.
STOPPED = ("buffer", "batcher", "env copy-digits", "env chain-sum", "learner")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    with live(tmp_path_factory.mktemp("many"), SETTINGS) as made:
        made.up()
        made.until(lambda: made.version() >= 3, "version 3", 400)
        yield made
        made.close()


def trained(run: Live, env: str) -> int:
    """Rollouts of an env that are in a batch."""
    return sum(
        len(f.offsets)
        for f in run.records("fates", "fate")
        if isinstance(f, Fate) and f.environment == env and f.fate == "batched"
    )


@pytest.mark.live
@pytest.mark.parametrize("env", ["copy-digits", *GYM, "reverse"])
def test_every_env_is_trained_on(run: Live, env: str):
    run.until(lambda: trained(run, env) > 0, f"rollouts of {env} in a batch", 120)


@pytest.mark.live
@pytest.mark.parametrize("language", ["python", pytest.param("go", marks=pytest.mark.slow)])
def test_rollouts_from_outside_are_trained_on_and_their_logprobs_are_the_policys(
    run: Live, tmp_path: Path, language: str
):
    program = (
        [str(go.built(tmp_path))]
        if language == "go"
        else [sys.executable, str(ROOT / "examples" / "external_env.py")]
    )
    before = trained(run, OUTSIDE)
    done = subprocess.run(
        [*program, run.log().address, run.run.run, OUTSIDE, "3"],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    run.until(lambda: trained(run, OUTSIDE) > before, "rollouts from outside in a batch", 120)
    rollouts = [
        r
        for r in run.records(topology.rollouts(OUTSIDE), "rollout")
        if isinstance(r, Rollout)
        and r.policy_version == r.newest_policy_version
        and not r.failure
        and r.producer.endswith("-go") == (language == "go")
    ]
    version = rollouts[0].policy_version
    chosen = [r for r in rollouts if r.policy_version == version]
    announced = next(
        v
        for v in run.records("policy-versions", "policy-version")
        if isinstance(v, PolicyVersion) and v.version == version
    )
    weights = pull(announced, run.run.store, tmp_path / "weights")
    sequences = [
        np.concatenate([turn.tokens for turn in r.turns if turn.tokens is not None]) for r in chosen
    ]
    for r, expected in zip(chosen, learner_logprobs(weights, sequences, 1.0, LENGTH), strict=True):
        logprobs = r.turns[-1].logprobs
        assert logprobs is not None
        off = np.abs(expected[-len(logprobs) :] - wide_logprobs(logprobs)).max()
        assert off <= 1e-4 + 1 / 4096  # they were rounded


@pytest.mark.live
def test_parts_that_are_stopped_are_started_again_and_the_loop_goes_on(run: Live):
    before = {part: run.part(part) for part in STOPPED}
    for process in before.values():
        process.terminate()
    for part, process in before.items():
        process.wait(patience(30))
        run.until(
            lambda part=part, old=process.pid: any_part(run, part, old),
            f"another process of {part}",
            60,
        )
    run.advances(3, f"after {', '.join(STOPPED)} were stopped", 240)


@pytest.mark.live
def test_status_shows_the_parts_of_a_live_run(run: Live):
    shown = run.command("status", str(run.file))
    assert shown.returncode == 0, shown.stderr
    for name in ("buffer", "batcher", "learner", "inference-0", "env-copy-digits-0"):
        assert name in shown.stdout
