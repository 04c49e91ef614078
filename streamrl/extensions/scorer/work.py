"""Which batches a worker of the pool scores: those of its number that the lead learner has yet to
train on and no worker has scored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.scorer.extension import Scorer
from streamrl.learner.inputs import follow_batches_until
from streamrl.learner.scores import ScoreAssembler
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.records_of import read_records
from streamrl.stream.records import Batch, Scores
from streamrl.system.errors import ConfigError

logger = logging.getLogger(__name__)


def check_worker(run: RunFile, worker: int) -> None:
    """Check that the run has a pool and that this worker is one of it. Raises ConfigError."""
    if not run.learner.needs_scores:
        raise ConfigError(
            "neither learner.kl.reference.by is pool nor is there a learner.teacher: scores would"
            " not be used; give one of them"
        )
    workers = run.settings_of(Scorer).replicas
    if worker >= workers:
        raise ConfigError(
            f"--index {worker}: scorer.replicas is {workers}, so the last worker is {workers - 1}"
        )


def follow_work(
    run: RunFile, log: Log, worker: int, stop: threading.Event
) -> Iterator[tuple[Batch, int]]:
    """The batches of this worker as they arrive, until `stop` is set. Each comes with the offset
    after it. What has been scored is read before this returns.
    """
    workers = run.settings_of(Scorer).replicas
    start, scored = resume_point(run, log)
    logger.info("worker %d of %d: begins at offset %d of batches", worker, workers, start)
    return (
        (batch, offset)
        for batch, offset in follow_batches_until(log, start, stop)
        if batch.number % workers == worker and not scored.has(batch.number)
    )


def resume_point(run: RunFile, log: Log) -> tuple[int, ScoreAssembler]:
    """The offset in `batches` that the lead learner resumes from, and the scores that exist from
    there on.
    """
    committed = log.committed_offsets(topology.learner_identity(run.learner.name))
    first_scores = committed.get(topology.SCORES_PARTITION, 0)
    scored = ScoreAssembler()
    for scores, offset in read_records(log, topology.SCORES_PARTITION, Scores, first_scores):
        scored.add(scores, offset)
    return committed.get(topology.BATCHES_PARTITION, 0), scored
