"""A finished run is distilled from a teacher that it did not have. The versions of the fork are
those of a run that had the teacher from the start, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.config.run_file import with_overrides
from streamrl.config.sections.learner import TinyModel
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.extensions.recordings.fork_topics import copy_for_retraining
from streamrl.learner.initial import write_tiny
from streamrl.learner.recompute import seed_fork
from streamrl.stream.log.memory import MemoryLog
from streamrl.weights.announcements import announced_hashes
from tests.extensions.recordings.test_retraining_fork import (
    PARTITIONED,
    KeyedLog,
    batches,
    right,
    wander,
)
from tests.extensions.scorer.test_process import scores, scoring
from tests.learner.conftest import CONTEXT, TINY
from tests.learner.test_forked_rewards import begun, run_of, trained
from tests.learner.test_process import learning


def with_scores(log: MemoryLog) -> MemoryLog:
    log.add("scores", 1)
    return log


def test_its_versions_are_those_of_a_run_that_had_the_teacher_from_the_start(
    tmp_path: Path, tiny: Path
):
    other = write_tiny(tmp_path / "teacher", TinyModel(**{**TINY.model_dump(), "seed": 5}), CONTEXT)
    distilled = (
        f"learner.teacher={other}",
        "envs.copy.loss={teacher_kl: 0.5}",
        "scorer.replicas=1",
    )
    run = run_of(tmp_path, tiny)
    first = begun(run)
    log = wander(1, run, "exact", right, first=first)
    taught = with_overrides(run, distilled)
    then = with_scores(wander(1, taught, "exact", right, first=first))
    with scoring(taught, then, 0) as (worker,):
        worker.until(lambda: len(scores(then)) == len(batches(then)))
    child = child_run_file(run, "taught", distilled).model_copy(
        update={"fork": Fork(run=run.run, version=0, sha256=first.sha256)}
    )
    stored = seed_fork(run, child, log, 0, lambda done, total: None)
    new = with_scores(KeyedLog(PARTITIONED))
    made = copy_for_retraining(log, new, run, child, stored.uri, [], {})
    wanted = trained(taught, then)
    assert len(wanted) == len(batches(then)) + 1 >= 4
    with scoring(made.run, new, 0), learning(made.run, new) as life:
        life.until(lambda: len(announced_hashes(new, "lead")) == len(wanted))
    assert announced_hashes(new, "lead") == wanted
    before = trained(run, log)
    assert before[0] == wanted[0] and before[1] != wanted[1]
