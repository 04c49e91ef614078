"""Scorer: batches in, their logprobs under the reference and the teacher out. The scorer is a pool
of n workers; worker i scores the batches i, i + n, i + 2 n, ...

A worker has no state. Its work is the batches that the lead learner has not trained on and nobody
has scored. So a worker may be killed at any time, and a run may continue with more workers or
fewer. If two workers score the same batch, the second result is ignored.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.errors import ConfigError
from streamrl.learner.inputs import follow_batches_until, read_scores, wait_for_version
from streamrl.learner.mesh import enable_compilation_cache, make_deterministic
from streamrl.learner.reference import ReferenceModel, static_reference_dir
from streamrl.learner.scores import ScoreAssembler
from streamrl.learner.update import Updater
from streamrl.log.codec import to_message
from streamrl.log.protocol import Log, Output, Writer
from streamrl.processor.part import OpenPart, open_part
from streamrl.records import Batch
from streamrl.scorer.scoring import open_models, score_all, to_metrics
from streamrl.weights.store import pull

logger = logging.getLogger(__name__)

BATCHES = topology.sole_partition(topology.BATCHES)
SCORES = topology.sole_partition(topology.SCORES)


def main(run: RunFile, log: Log, stop: threading.Event, worker: int = 0) -> None:
    """Run worker number `worker` until `stop` is set. Raises ConfigError if the run has no such
    worker.
    """
    check_worker(run, worker)
    identity = topology.scorer_part(worker)
    workers = run.scorer.replicas
    with (
        open_part(log, identity, log.writer(identity, topology.SCORES)) as part,
        open_updater(run) as updater,
    ):
        start, scored = resume_point(run, log)
        logger.info("%s of %d: begins at offset %d of batches", identity, workers, start)
        part.mark_ready()
        own = (
            (batch, offset)
            for batch, offset in follow_batches_until(log, start, stop)
            if batch.number % workers == worker and not scored.has(batch.number)
        )
        score_batches(run, part, updater, own, stop)


def check_worker(run: RunFile, worker: int) -> None:
    """Check that the run has a pool and that this worker is one of it. Raises ConfigError."""
    if not run.learner.uses_scorer_pool:
        raise ConfigError(
            f"learner.reference.by is {run.learner.reference.by}: nobody would read the scores; set"
            " it to pool, or give learner.teacher.path"
        )
    if worker >= run.scorer.replicas:
        raise ConfigError(
            f"--index {worker}: scorer.replicas is {run.scorer.replicas}, so the last worker is"
            f" {run.scorer.replicas - 1}"
        )


@contextmanager
def open_updater(run: RunFile) -> Iterator[Updater]:
    make_deterministic()
    enable_compilation_cache(run.directory / "compiled")
    updater = Updater(run.learner, run.batcher.rows)
    with updater.use_mesh():
        yield updater


def score_batches(
    run: RunFile,
    part: OpenPart[Writer],
    updater: Updater,
    batches: Iterable[tuple[Batch, int]],
    stop: threading.Event,
) -> None:
    """The loop: score one batch after the other. Each comes with the offset behind it."""
    pool = None
    idle_since = time.monotonic()
    for batch, offset in batches:
        # There is a batch, so the learner has made the model by now.
        pool = pool or open_models(run)
        if pool.reference and not ensure_reference(
            run, part.log, pool.reference, batch.number, stop
        ):
            break
        begun = time.monotonic()
        scores, not_finite = score_all(updater, pool, batch, part.name)
        part.writer.commit([to_message(Output(topology.SCORES, str(batch.number), scores))])
        part.writer.commit_offsets({BATCHES: offset})
        values = to_metrics(batch, scores.reference, begun - idle_since, time.monotonic() - begun)
        part.meter.publish(
            {**values, "scorer/not_finite_tokens": float(not_finite)},
            step=batch.number,
        )
        idle_since = time.monotonic()


def resume_point(run: RunFile, log: Log) -> tuple[int, ScoreAssembler]:
    """The offset in `batches` that the lead learner resumes from, and the scores that exist from
    there on.
    """
    dealt_with = log.committed_offsets(topology.learner_identity(run.learner.name))
    scored = ScoreAssembler()
    for scores, offset in read_scores(log, dealt_with.get(SCORES, 0)):
        scored.add(scores, offset)
    return dealt_with.get(BATCHES, 0), scored


def ensure_reference(
    run: RunFile, log: Log, reference: ReferenceModel, number: int, stop: threading.Event
) -> bool:
    """Load the reference of batch `number`, after waiting for its version if necessary. False if
    `stop` is set first.
    """
    wanted = reference.version_to_load(number)
    if wanted is None:
        return True
    if (directory := static_reference_dir(run, wanted)) is not None:
        reference.load(wanted, directory)
        return True
    announced = wait_for_version(log, run.learner.name, wanted, stop)
    if announced is None:
        return False
    with tempfile.TemporaryDirectory() as copied:
        reference.load(wanted, pull(announced, run.store, Path(copied) / "reference", link=True))
    logger.info("from batch %d on the reference is version %d", number, wanted)
    return True
