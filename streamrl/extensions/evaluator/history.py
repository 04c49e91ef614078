"""Reads earlier evaluations from the log, and the problems that training has posed."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.held_out import possible_fingerprints, problem_fingerprint
from streamrl.extensions.evaluator.suite import EvalSuite
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.records_of import records_of, rollouts_of
from streamrl.stream.records import Evaluation
from streamrl.system.errors import ConfigError


def read_evaluations(log: Log) -> list[Evaluation]:
    """All evaluations of the run so far, in the order they were made."""
    return [evaluation for evaluation, _ in records_of(log, topology.EVALS, Evaluation)]


def posed_fingerprints(log: Log, env: str) -> frozenset[bytes]:
    """The fingerprints of all problems that the env has posed in training, by its rollouts."""
    fingerprints: set[bytes] = set()
    for _, rollout, _ in rollouts_of(log, [env]):
        if rollout.turns:
            fingerprints.update(possible_fingerprints(rollout.turns[0]))
    return frozenset(fingerprints)


def evaluated_versions(run: RunFile, log: Log) -> dict[int, None]:
    """The versions for which all evaluations of the run file have been made."""
    names_by_version: dict[int, dict[str, None]] = {}
    for evaluation in read_evaluations(log):
        if evaluation.learner == run.learner.name:
            names_by_version.setdefault(evaluation.version, {})[evaluation.name] = None
    wanted = run.eval.envs.keys()
    return {version: None for version, names in names_by_version.items() if wanted <= names.keys()}


def check_unseen(suites: Sequence[EvalSuite], log: Log) -> None:
    """Check that training has posed none of the problems. It does not pose them as long as the run
    file has the evaluation, but it may have posed them before. Raises ConfigError.
    """
    for suite in suites:
        posed = posed_fingerprints(log, suite.environment)
        if not posed:
            continue
        for held in suite.problems:
            if problem_fingerprint(held.problem) in posed:
                raise ConfigError(
                    f"eval.envs.{suite.name}: problem {held.number} was posed in training before"
                    " the run file had this evaluation; choose another seed for it, or leave it to"
                    " `streamrl eval`, which takes other problems"
                )
