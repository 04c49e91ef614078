"""Recomputing the lead's policy at a version, from a checkpoint or the beginning and the recorded
batches. On the same machine, the result is bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from streamrl.config.run_file import RunFile
from streamrl.learner.files import checkpoints
from streamrl.learner.files.checkpoints import TrainingPosition
from streamrl.learner.initial import initial_model_dir
from streamrl.learner.inputs import TrainingInput, read_existing
from streamrl.learner.trainer import (
    PolicyTrainer,
    ResumePoint,
    checkpoint_directory,
    fork_checkpoint,
    open_trainer,
)
from streamrl.stream.log.protocol import Log
from streamrl.system.errors import ConfigError, InputGone, VersionMismatch
from streamrl.weights.announcements import announced_hashes
from streamrl.weights.manifest import WeightRef
from streamrl.weights.store import Store

Progress = Callable[[int, int], None]  # (versions done, of how many)


def retrain_all(run: RunFile, log: Log, first: int | None = None) -> Iterator[TrainingPosition]:
    """Train every version of the lead again. Yields the version that training begins with, and then
    one for each recorded batch, each with its new hash.

    `first`: begin with the checkpoint of that version. Raises ConfigError if there is none.
    """
    with open_trainer(run, _resume_point(run, first)) as policy:
        policy.sha256()
        yield policy.position
        for taken in recorded_inputs(log, policy):
            policy.step(taken)
            policy.sha256()
            yield policy.position


@contextmanager
def recompute_version(
    run: RunFile, log: Log, version: int, progress: Progress = lambda done, total: None
) -> Generator[PolicyTrainer]:
    """The lead's policy and optimizer at `version`, recomputed from the nearest checkpoint before
    it. They exist for as long as the block lasts.

    Raises ConfigError if the version is not announced or older than the run, VersionMismatch if it
    does not have the announced hash, and InputGone if too few batches are recorded.
    """
    learner = run.learner.name
    announced = announced_hashes(log, run.learner.name)
    if version not in announced:
        raise ConfigError(
            f"version {version} of {learner} in run {run.run} is not announced; the newest is"
            f" {max(announced, default=-1)}"
        )
    if run.fork is not None and version < run.fork.version:
        raise ConfigError(
            f"run {run.run} begins at version {run.fork.version}; version {version} is one of run"
            f" {run.fork.run}: ask that one"
        )
    directory = checkpoint_directory(run, learner)
    checkpoint = checkpoints.latest(directory, version)
    with open_trainer(run, ResumePoint(directory, checkpoint) if checkpoint else None) as policy:
        begun = policy.version
        for taken in recorded_inputs(log, policy):
            if policy.version == version:
                break
            policy.step(taken)
            progress(policy.version - begun, version - begun)
        if policy.version != version:
            raise InputGone(
                f"the batches recorded in run {run.run} end at version {policy.version}: version"
                f" {version} cannot be computed again"
            )
        verify_hash(learner, announced, version, policy.sha256())
        yield policy


def recorded_inputs(log: Log, policy: PolicyTrainer) -> Iterator[TrainingInput]:
    """The recorded inputs that the policy has not been trained on yet."""
    inputs = read_existing(
        log, policy.run.learner.needs_scores, policy.position.offset, policy.position.scores
    )
    return (taken for taken in inputs if policy.is_due(taken.batch))


def seed_fork(
    parent: RunFile, run: RunFile, log: Log, version: int, progress: Progress
) -> WeightRef:
    """Give a fork its beginning: the parent's policy and optimizer at `version`, the initial model,
    and the weights in the fork's store.

    `log` is the parent's. Raises the errors of `recompute_version`.
    """
    if not run.model.path:
        (run.directory / "model").mkdir(parents=True)
        for path in initial_model_dir(parent).iterdir():
            (run.directory / "model" / path.name).write_bytes(path.read_bytes())
    with recompute_version(parent, log, version, progress) as policy:
        stored = policy.snapshot().put_into_store(Store(f"{run.store}/{run.learner.name}")).stored
        policy.position = policy.position._replace(offset=0, scores=0)  # of the fork's own batches
        policy.save(run.directory / "start", keep=1)
    return stored


def verify_hash(learner: str, announced: dict[int, str], version: int, sha256: str) -> None:
    """Check that the version has the announced hash. Raises VersionMismatch."""
    if sha256 != announced[version]:
        raise version_mismatch(learner, version, sha256, announced[version])


def version_mismatch(learner: str, version: int, sha256: str, announced: str) -> VersionMismatch:
    return VersionMismatch(
        f"version {version} of {learner} came out as {sha256}, but {announced} was announced: the"
        " code, the settings or the machine have changed since; set learner.on_divergence:"
        " announce to continue with what came out, or continue under a new run name"
    )


def _resume_point(run: RunFile, first: int | None) -> ResumePoint | None:
    begins = run.fork.version if run.fork else 0
    if first is None or first == begins:
        return fork_checkpoint(run)
    directory = checkpoint_directory(run, run.learner.name)
    checkpoint = checkpoints.latest(directory, first)
    if checkpoint is None or checkpoint.version != first:
        existing = ", ".join(map(str, sorted({begins, *checkpoints.versions(directory)})))
        raise ConfigError(
            f"--from {first}: there is no checkpoint of that version in {directory}; there:"
            f" {existing}"
        )
    return ResumePoint(directory, checkpoint)
