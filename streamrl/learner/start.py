"""Where a learner begins: its settings, and the checkpoint that it continues from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamrl.config.choices import NAME, OPTIMIZER_STATE
from streamrl.config.run_file import RunFile, with_overrides
from streamrl.learner.files import checkpoints
from streamrl.learner.files.checkpoints import TrainingPosition
from streamrl.learner.parallel import distributed
from streamrl.learner.recompute import recompute_version
from streamrl.learner.trainer import ResumePoint, checkpoint_directory, copies_of
from streamrl.stream.log.protocol import Log
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import ConfigError, VersionMismatch
from streamrl.weights.announcements import newest_lineages, read_announcements


def learner_settings(
    run: RunFile, learner: str, at: int | None, overrides: Sequence[str]
) -> RunFile:
    """The run file with this learner's own settings.

    `learner`: its name; `at`, `overrides`: as for `process.main`. Raises ConfigError for a name
    that cannot be used, for settings that are not a learner's, and for settings of the lead.
    """
    if not NAME.fullmatch(learner):
        raise ConfigError(f"--name {learner}: not a name of lowercase letters, digits and '-'")
    if learner == run.learner.name and (overrides or at is not None):
        raise ConfigError(
            f"--at and --set are for a second learner: give it a --name; {learner} is the lead, and"
            " the run file has its settings"
        )
    for override in overrides:
        if not override.startswith("learner.") or override.startswith("learner.name="):
            raise ConfigError(
                f"--set {override}: a second learner can have other settings learner.*, and a"
                " --name; all else is the run's"
            )
    # A preset also has settings of the buffer, and those are the run's.
    own = run.model_copy(update={"learner": with_overrides(run, overrides).learner})
    for name in OPTIMIZER_STATE if at is not None else ():
        if getattr(own.learner, name) != getattr(run.learner, name):
            raise ConfigError(
                f"--set learner.{name}: a learner that begins at version {at} continues with the"
                f" state of the lead's optimizer, made with {getattr(run.learner, name)}; leave one"
                " of them out"
            )
    if own.learner.teacher != run.learner.teacher:
        raise ConfigError(
            "--set learner.teacher: the pool, if the run has one, scores under the run's own"
            " teacher; leave it out, or begin another run"
        )
    if own.learner.pool_scores_reference and own.learner.reference != run.learner.reference:
        raise ConfigError(
            "--set learner.kl.reference: the pool, if the run has one, scores under the run's own;"
            " add --set learner.kl.reference.by=learner"
        )
    return own


class StartPoint(NamedTuple):
    """Where a learner begins, and what it has announced before."""

    announced: dict[int, PolicyVersion]  # The newest lineage of each version.
    checkpoint: TrainingPosition | None  # Its own newest one.
    resume_from: ResumePoint | None  # None: training begins with what the run began with.


def find_start(run: RunFile, log: Log, learner: str, at: int | None) -> StartPoint:
    """Where the learner begins: at its own newest checkpoint, otherwise with the lead's state at
    version `at`, otherwise as the run began. Raises VersionMismatch.
    """
    history = list(read_announcements(log, learner))
    checkpoint = newest_checkpoint(run, learner, history)
    resume_from = None
    if checkpoint is not None:
        resume_from = ResumePoint(checkpoint_directory(run, learner), checkpoint)
    elif at is not None:
        resume_from = clone_lead_checkpoint(run, log, learner, at)
    return StartPoint(newest_lineages(history), checkpoint, resume_from)


def newest_checkpoint(
    run: RunFile, learner: str, history: Sequence[PolicyVersion]
) -> TrainingPosition | None:
    """The newest checkpoint of the learner, or None. Rank zero removes leftovers of incomplete
    ones, and fetches one that is newer from learner.checkpoint_copies.

    `history`: all versions that the learner has announced. Raises VersionMismatch if the checkpoint
    has weights that are not among them, and CheckpointError if the copies cannot be read.
    """
    newest = max((record.version for record in history), default=-1)
    directory = checkpoint_directory(run, learner)
    if distributed.is_rank_zero():
        checkpoints.remove_leftovers(directory, newest)
        copies = copies_of(run, learner)
        if copies is not None:
            copies.fetch_newest(directory, newest)
    distributed.barrier("checkpoints")
    checkpoint = checkpoints.latest(directory, newest)
    if checkpoint is None:
        return None
    announced = {(record.version, record.sha256) for record in history}
    if (checkpoint.version, checkpoint.sha256) not in announced:
        where = checkpoints.path_of(directory, checkpoint.version)
        raise VersionMismatch(
            f"checkpoint {where} has weights that {learner} never announced: "
            f"it is of another run; delete {directory}"
        )
    return checkpoint


def clone_lead_checkpoint(run: RunFile, log: Log, learner: str, version: int) -> ResumePoint:
    """A checkpoint of the lead's policy and optimizer at `version`, from which this learner begins.
    It is computed once and then kept.
    """
    directory = checkpoint_directory(run, learner) / "start"
    checkpoint = checkpoints.latest(directory, version)
    if checkpoint is not None and checkpoint.version == version:
        return ResumePoint(directory, checkpoint)
    with recompute_version(run, log, version) as policy:
        policy.save(directory, keep=1)
        return ResumePoint(directory, policy.position)
