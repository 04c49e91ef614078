"""Learner: batches in, and their scores if a scorer pool makes them; policy versions out. Batch k
is trained at version k and gives version k + 1.

The learner is not a pure step function, because its output is not only records. Its state is a
checkpoint, which stores its position in `batches`. After a crash, the batches after the checkpoint
are trained again. If a version has the announced hash again, it is not announced twice; otherwise
it is announced as a new lineage.

A run may have any number of learners. Each has its own name, Kafka identity, store and checkpoints.
Servers follow only the lead. One learner may be several JAX processes (`distributed.py`), of which
rank zero writes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.learner.inputs import TrainingInput, follow, take_until_stopped
from streamrl.learner.parallel import distributed
from streamrl.learner.parallel.distributed import ProcessRank
from streamrl.learner.parallel.mesh import check_division, prepare_process
from streamrl.learner.publisher import VersionPublisher
from streamrl.learner.start import find_start, learner_settings
from streamrl.learner.trainer import checkpoint_directory, open_trainer
from streamrl.learner.writing import open_publisher, open_writing_part
from streamrl.stream.log.protocol import Log

logger = logging.getLogger(__name__)


def main(
    run: RunFile,
    log: Log,
    stop: threading.Event,
    name: str | None = None,
    at: int | None = None,
    overrides: Sequence[str] = (),
    rank: ProcessRank | None = None,
) -> None:
    """Train until `stop` is set. `name` is given for a learner other than the lead, which may have
    its own learner.* settings in `overrides`.

    A second learner begins with the lead's state at version `at`, or by default as the run began. A
    learner that has a checkpoint resumes from it. `rank` is given if this is one of several
    processes.

    Raises ConfigError for settings that a learner cannot have, VersionMismatch for a checkpoint of
    another run, and what training and publishing raise.
    """
    learner = name or run.learner.name
    own = learner_settings(run, learner, at, overrides)
    prepare_process(own)
    if rank is not None:
        distributed.initialize(rank)
    check_division(own.learner, own.batcher.processes)
    with open_writing_part(log, topology.learner_identity(learner), stop) as part:
        # The writer fences an earlier process, so from here on its announcements are final.
        distributed.barrier("alone")
        start = find_start(run, log, learner, at)
        with (
            open_trainer(own, start.resume_from, checkpoint_directory(run, learner)) as policy,
            open_publisher(learner, policy, start.announced, part) as publisher,
        ):
            publisher.announce_start(start.checkpoint)
            if start.checkpoint is not None:
                logger.info(
                    "resumed version %d at offset %d of batches; version %d is announced",
                    start.checkpoint.version,
                    start.checkpoint.offset,
                    max(start.announced),
                )
            log.mark_ready()
            position = policy.position
            inputs = publisher.until_failure(
                follow(log, own.learner.needs_scores, position.offset, position.scores)
            )
            if rank is None:
                inputs = take_until_stopped(stop, inputs)
            else:
                inputs = distributed.synchronized(inputs, stop)
            train(publisher, inputs)
            publisher.save_last_checkpoint()


def train(publisher: VersionPublisher, inputs: Iterable[TrainingInput]) -> None:
    """The loop: train on one input after the other, and publish the versions.

    Kafka's client fetches the next batch during the step. It is laid out after it, on this thread:
    0.06 to 0.12 s a million tokens, of which a step takes tens of seconds.
    """
    idle_since_s = time.monotonic()
    for taken in inputs:
        publisher.train(taken, time.monotonic() - idle_since_s)
        idle_since_s = time.monotonic()
