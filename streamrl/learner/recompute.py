"""The lead's policy at a version, computed again from a checkpoint or the beginning and the
recorded batches. Same machine, same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from streamrl.config.run_file import RunFile
from streamrl.errors import ConfigError, InputGone, VersionMismatch
from streamrl.learner import checkpoints
from streamrl.learner.checkpoints import Position
from streamrl.learner.initial import origin
from streamrl.learner.inputs import Taken, again, announcements
from streamrl.learner.trainer import Start, Training, checkpoint_directory, inherited, training
from streamrl.log.protocol import Log
from streamrl.weights.store import Store, Stored

Progress = Callable[[int, int], None]  # (versions done, of how many)


def retrained(run: RunFile, log: Log, first: int | None = None) -> Iterator[Position]:
    """Every version of the lead again: the one it begins with, then one a recorded batch, each with
    the hash that it has now.

    `first`: begin with the checkpoint of that version. Raises ConfigError when there is none.
    """
    with training(run, _start(run, first)) as policy:
        policy.sha256()
        yield policy.position
        for taken in recorded(log, policy):
            policy.step(taken)
            policy.sha256()
            yield policy.position


@contextmanager
def recomputed(
    run: RunFile, log: Log, version: int, progress: Progress = lambda done, total: None
) -> Generator[Training]:
    """The lead's policy and optimiser at `version`, for as long as the block lasts, from the
    nearest checkpoint before it.

    Raises ConfigError when the version is not announced or older than the run, VersionMismatch when
    it does not come out as announced, InputGone when too few batches are recorded.
    """
    learner, announced = run.learner.name, announcements(log, run.learner.name)
    if version not in announced:
        raise ConfigError(
            f"version {version} of {learner} in run {run.run} is not announced; the newest is {max(announced, default=-1)}"
        )
    if run.fork is not None and version < run.fork.version:
        raise ConfigError(
            f"run {run.run} begins at version {run.fork.version}; version {version} is one of run {run.fork.run}: ask that one"
        )
    directory = checkpoint_directory(run, learner)
    found = checkpoints.latest(directory, version)
    with training(run, Start(directory, found) if found else None) as policy:
        begun = policy.version
        for taken in recorded(log, policy):
            if policy.version == version:
                break
            policy.step(taken)
            progress(policy.version - begun, version - begun)
        if policy.version != version:
            raise InputGone(
                f"the batches recorded in run {run.run} end at version {policy.version}: version {version} cannot be computed again"
            )
        check(learner, announced, version, policy.sha256())
        yield policy


def recorded(log: Log, policy: Training) -> Iterator[Taken]:
    """What it was trained on, from where it stands."""
    there = again(log, policy.run.learner.pooled, policy.position.offset, policy.position.scores)
    return (taken for taken in there if policy.due(taken.batch))


def plant(parent: RunFile, run: RunFile, log: Log, version: int, progress: Progress) -> Stored:
    """Leave with a fork what it begins with: the parent's policy and optimiser at `version`, its
    initial model, and the weights in the fork's store.

    `log`: the parent's. Raises as `recomputed`.
    """
    if not run.model.path:
        (run.directory / "model").mkdir(parents=True)
        for path in origin(parent).iterdir():
            (run.directory / "model" / path.name).write_bytes(path.read_bytes())
    with recomputed(parent, log, version, progress) as policy:
        stored = policy.snapshot().write(Store(f"{run.store}/{run.learner.name}")).stored
        policy.position = policy.position._replace(offset=0, scores=0)  # of the fork's own batches
        policy.save(run.directory / "start", keep=1)
    return stored


def check(learner: str, announced: dict[int, str], version: int, sha256: str) -> None:
    """Is it what was announced? Raises VersionMismatch."""
    if sha256 != announced[version]:
        raise differs(learner, version, sha256, announced[version])


def differs(learner: str, version: int, sha256: str, announced: str) -> VersionMismatch:
    return VersionMismatch(
        f"version {version} of {learner} came out as {sha256}, but {announced} was announced: "
        "the code, the settings or the machine have changed since; "
        "set learner.on_divergence: announce to go on with what came out, or go on under a new run name"
    )


def _start(run: RunFile, first: int | None) -> Start | None:
    begins = run.fork.version if run.fork else 0
    if first is None or first == begins:
        return inherited(run)
    directory = checkpoint_directory(run, run.learner.name)
    found = checkpoints.latest(directory, first)
    if found is None or found.version != first:
        there = ", ".join(map(str, sorted({begins, *checkpoints.versions(directory)})))
        raise ConfigError(
            f"--from {first}: there is no checkpoint of that version in {directory}; there: {there}"
        )
    return Start(directory, found)
