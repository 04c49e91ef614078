"""What the log has of earlier evaluations, and of problems that training has posed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamrl.config import run_file
from streamrl.envs.held_out import possible_fingerprints
from streamrl.extensions.evaluator import history
from streamrl.extensions.evaluator.history import (
    check_unseen,
    evaluated_versions,
    posed_fingerprints,
    read_evaluations,
)
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Evaluation
from streamrl.system.errors import ConfigError
from tests.support.build import rollout
from tests.support.data_path import publish

RUN = run_file.parse(
    {
        "run": "r",
        "envs": {"copy-digits": {}},
        "eval": {"every": 1, "envs": {"a": {"env": "copy-digits"}, "b": {"env": "copy-digits"}}},
    }
)


def evaluation(name: str, version: int, learner: str = "lead") -> Evaluation:
    counts = np.zeros(0, np.int32)
    return Evaluation(
        name=name,
        environment="copy-digits",
        learner=learner,
        version=version,
        sha256="ab",
        problems=np.zeros(0, np.int64),
        samples=counts,
        passed=counts,
        rewards=np.zeros(0, np.float32),
        pass_at=[],
        reward_mean=0.0,
        reward_low=0.0,
        reward_high=0.0,
        truncated=0,
        repeated=0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=8,
        seed=0,
        time_s=0.0,
        seconds=1.0,
    )


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog({"evals": 1, "rollouts.copy-digits": 2})


def test_a_version_is_evaluated_once_all_evaluations_of_the_run_file_have_been_made(log: MemoryLog):
    made = [evaluation("a", 1), evaluation("b", 1), evaluation("a", 2), evaluation("gone", 2)]
    made += [evaluation("a", 3, "other"), evaluation("b", 3, "other")]
    publish(log, *(Output("evals", record.name, record) for record in made))
    assert [found.version for found in read_evaluations(log)] == [1, 1, 2, 2, 3, 3]
    assert evaluated_versions(RUN, log) == {1: None}


def test_the_problems_of_all_rollouts_are_known(log: MemoryLog):
    first = rollout("copy-digits", "g0")
    publish(log, Output("rollouts.copy-digits", "g0", first))
    assert posed_fingerprints(log, "copy-digits") == set(possible_fingerprints(first.turns[0]))


def test_a_problem_that_training_has_posed_is_refused(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    posed = possible_fingerprints(rollout("copy-digits", "g0").turns[0])
    fingerprints = {"new": b"new", "posed": next(iter(posed))}
    monkeypatch.setattr(history, "problem_fingerprint", fingerprints.__getitem__)
    problems = [SimpleNamespace(number=i, problem=name) for i, name in enumerate(fingerprints)]
    suites: Any = [SimpleNamespace(name="a", environment="copy-digits", problems=problems)]
    check_unseen(suites, log)
    publish(log, Output("rollouts.copy-digits", "g0", rollout("copy-digits", "g0")))
    with pytest.raises(ConfigError, match=r"^eval.envs.a: problem 1 was posed in training before"):
        check_unseen(suites, log)
