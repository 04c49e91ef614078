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
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from streamrl.config import topology
from streamrl.config.choices import NAME
from streamrl.config.run_file import RunFile, changed
from streamrl.errors import ConfigError, VersionMismatch
from streamrl.learner import checkpoints, distributed
from streamrl.learner.checkpoints import TrainingPosition
from streamrl.learner.distributed import ProcessRank
from streamrl.learner.inputs import follow, newest_lineages, read_announcements, take_until_stopped
from streamrl.learner.mesh import enable_compilation_cache, make_deterministic
from streamrl.learner.publisher import VersionPublisher
from streamrl.learner.recompute import recompute_version
from streamrl.learner.trainer import ResumePoint, checkpoint_directory, open_trainer
from streamrl.log.protocol import Log
from streamrl.log.retrying import RetryingWriter
from streamrl.processor.part import OpenPart, open_part
from streamrl.records import PolicyVersion

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
    """
    learner = name or run.learner.name
    own = learner_settings(run, learner, at, overrides)
    make_deterministic()
    enable_compilation_cache(
        run.directory / "compiled"
    )  # before anything is compiled: JAX asks once
    if rank is not None:
        distributed.initialize(rank)
    if (devices := distributed.device_count()) != run.batcher.processes:
        logger.warning(
            "batches are divided for %d processes, this learner has %d devices; set"
            " batcher.processes",
            run.batcher.processes,
            devices,
        )
    with open_writing_part(log, topology.learner_identity(learner), stop) as part:
        distributed.barrier("alone")  # only now the announcements are final
        history = list(read_announcements(log, learner))
        announced = newest_lineages(history)
        found = newest_checkpoint(run, learner, history)
        start = None
        if found is not None:
            start = ResumePoint(checkpoint_directory(run, learner), found)
        elif at is not None:
            start = clone_lead_checkpoint(run, log, learner, at)
        with (
            open_trainer(own, start) as policy,
            VersionPublisher(
                learner,
                policy,
                announced,
                writer=part.writer if part else None,
                meter=part.meter if part else None,
                check_rival=partial(part.writer.check_rival, learner) if part else lambda: None,
            ) as publisher,
        ):
            publisher.announce_start(found)
            if found is not None:
                logger.info(
                    "resumed version %d at offset %d of batches; version %d is announced",
                    found.version,
                    found.offset,
                    max(announced),
                )
            log.mark_ready()
            idle_since = time.monotonic()
            coming = publisher.until_failure(
                follow(
                    log,
                    own.learner.uses_scorer_pool,
                    policy.position.offset,
                    policy.position.scores,
                )
            )
            for taken in (
                take_until_stopped(stop, coming)
                if rank is None
                else distributed.synchronized(coming, stop)
            ):
                publisher.train(taken, time.monotonic() - idle_since)
                idle_since = time.monotonic()
            publisher.save_last_checkpoint()


def open_writing_part(
    log: Log, identity: str, stop: threading.Event
) -> AbstractContextManager[OpenPart[RetryingWriter] | None]:
    """The learner's part, in the one of its processes that writes; None in the others.

    What the writer cannot commit while the broker is away it commits later: hours of training are
    in it.
    """
    if not distributed.is_rank_zero():
        return nullcontext()
    writer = RetryingWriter(log, identity, topology.POLICY_VERSIONS, stop=stop)
    return open_part(log, identity, writer)


def newest_checkpoint(
    run: RunFile, learner: str, history: Sequence[PolicyVersion]
) -> TrainingPosition | None:
    """The checkpoint that training goes on from, if there is one. `history`: all versions that the
    learner has announced. Raises VersionMismatch for a checkpoint of another run.
    """
    newest = max((record.version for record in history), default=-1)
    directory = checkpoint_directory(run, learner)
    found = checkpoints.latest(directory, newest)
    if distributed.is_rank_zero():
        checkpoints.remove_leftovers(directory, newest)
    if found is None:
        return None
    if (found.version, found.sha256) not in {(known.version, known.sha256) for known in history}:
        where = checkpoints.path_of(directory, found.version)
        raise VersionMismatch(
            f"checkpoint {where} has weights that {learner} never announced: "
            f"it is of another run; delete {directory}"
        )
    return found


def learner_settings(
    run: RunFile, learner: str, at: int | None, overrides: Sequence[str]
) -> RunFile:
    """The run file with this learner's own settings. Raises ConfigError."""
    if not NAME.fullmatch(learner):
        raise ConfigError(f"--name {learner}: not a name of lowercase letters, digits and '-'")
    if learner == run.learner.name and (overrides or at is not None):
        raise ConfigError(
            f"--at and --set are for a second learner: give it a --name; {learner} is the lead, and"
            " the run file says how it learns"
        )
    for override in overrides:
        if not override.startswith("learner.") or override.startswith("learner.name="):
            raise ConfigError(
                f"--set {override}: a second learner can have settings learner.* of its own, and a"
                " --name; all else is the run's"
            )
    own = changed(run, overrides)
    if own.learner.uses_scorer_pool and own.learner.reference != run.learner.reference:
        raise ConfigError(
            "--set learner.reference: the pool, if the run has one, scores under the run's own; add"
            " --set learner.reference.by=learner"
        )
    return own


def clone_lead_checkpoint(run: RunFile, log: Log, learner: str, version: int) -> ResumePoint:
    """A checkpoint of the lead's policy and optimizer at `version`, for other learners to begin
    with. It is computed once.
    """
    directory = checkpoint_directory(run, learner) / "start"
    found = checkpoints.latest(directory, version)
    if found is not None and found.version == version:
        return ResumePoint(directory, found)
    with recompute_version(run, log, version) as policy:
        policy.save(directory, keep=1)
        return ResumePoint(directory, policy.position)
