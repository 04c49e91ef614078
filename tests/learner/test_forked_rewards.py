"""A fork with new rewards, as its learner trains it: its versions are those of a run that had these
rewards from the start, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.config.run_file import RunFile, with_overrides
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.extensions.recordings.fork_topics import copy_for_retraining
from streamrl.extensions.recordings.new_rewards import read_rewards
from streamrl.learner.recompute import retrain_all, seed_fork
from streamrl.learner.trainer import open_trainer
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.records import PolicyVersion
from streamrl.weights.announcements import announced_hashes
from tests.extensions.recordings.test_retraining_fork import (
    PARTITIONED,
    STYLE,
    WEIGHTED,
    KeyedLog,
    batches,
    judge,
    right,
    style,
    wander,
)
from tests.learner.test_process import learning


def run_of(directory: Path, tiny: Path) -> RunFile:
    settings = (
        f"runs_dir={directory}",
        f"model.path={tiny}",
        "learner.probe_tokens=8",
        "learner.loss=cispo",
    )
    return with_overrides(WEIGHTED, settings)


def begun(run: RunFile) -> PolicyVersion:
    """The announcement of the version that the run begins with."""
    with open_trainer(run, None) as policy:
        sha256 = policy.sha256()
    return PolicyVersion(learner="lead", version=0, uri="", size_bytes=0, sha256=sha256, batch=None)


def trained(run: RunFile, log: MemoryLog) -> dict[int, str]:
    """The hash of every version that the batches of a log make."""
    return {position.version: position.sha256 for position in retrain_all(run, log)}


def test_its_versions_are_those_of_a_run_that_had_the_rewards_from_the_start(
    tmp_path: Path, tiny: Path
):
    run = run_of(tmp_path, tiny)
    first = begun(run)
    log = wander(1, run, "exact", right, first=first)
    judge(log, style)
    then = wander(1, run, "style", style, first=first)
    child = child_run_file(run, "other", ()).model_copy(
        update={"fork": Fork(run=run.run, version=0, sha256=first.sha256)}
    )
    stored = seed_fork(run, child, log, 0, lambda done, total: None)
    new = KeyedLog(PARTITIONED)
    rewards = read_rewards(log, child.envs, [STYLE])
    made = copy_for_retraining(log, new, run, child, stored.uri, [STYLE], rewards)
    wanted = trained(run, then)
    assert len(wanted) == len(batches(then)) + 1 >= 4
    with learning(made.run, new) as life:
        life.until(lambda: len(announced_hashes(new, "lead")) == len(wanted))
    assert announced_hashes(new, "lead") == wanted
    before = trained(run, log)
    assert before[0] == wanted[0] and before[1] != wanted[1]
