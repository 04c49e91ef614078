"""`streamrl fork`: makes a run that begins with a policy version of another run, its parent, under
a changed configuration.

A fork at version k announces version k first and trains on batch k first, so ages and probes keep
their meaning. Its topics begin with the versions up to k, the positions of its envs in their
problems and, on request, the parent's rollouts. From these rollouts the fork makes its first batch
at once, in the parent's recorded order. The batch is journaled as usual, so the fork's parts start
as after any restart. The parent's topics are only read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from streamrl.config import topology
from streamrl.config.choices import NAME, OPTIMIZER_STATE
from streamrl.config.run_file import RunFile, with_overrides
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.fork_topics import (
    ForkResult,
    copy_for_retraining,
    copy_inherited,
)
from streamrl.extensions.recordings.new_rewards import ScorerVersion, read_rewards
from streamrl.extensions.recordings.progress import OnProgress, progress_bar
from streamrl.run.orchestrator.run_directory import write_run_file
from streamrl.stream.local_kafka import connect
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Log
from streamrl.system.errors import ConfigError, StreamrlError
from streamrl.weights.announcements import announced_hashes
from streamrl.weights.manifest import WeightRef


@dataclass(frozen=True)
class Retrain:
    """All rollouts recorded from the fork's version on are trained on again, with the rewards of
    these scorers where there are any.
    """

    scorers: tuple[ScorerVersion, ...] = ()


@dataclass(frozen=True)
class ForkRequest:
    """What `streamrl fork` is asked for."""

    parent: RunFile
    name: str  # of the fork
    version: int  # that it begins with
    overrides: Sequence[str]  # of the parent's settings
    # which of the parent's rollouts it has; "untrained": those that were not trained on by then
    rollouts: Literal["none", "untrained"] | Retrain


def fork_command(request: ForkRequest, time_s: float, console: Console) -> None:
    """Make the fork and print what it begins with. For the arguments and errors see `fork`."""
    version = request.version
    with progress_bar(f"computing version {version}", Console(stderr=True)) as progress:
        result = fork(request, time_s, progress)
    assert result.run.fork is not None
    console.print(
        f"run {request.name} begins with version {version} of {request.parent.run}, sha256"
        f" {result.run.fork.sha256} as announced",
        highlight=False,
    )
    counts = f"it has {result.rollouts:,} rollouts of {result.groups:,} groups"
    if isinstance(request.rollouts, Retrain):
        scorers = ", ".join(map(str, request.rollouts.scorers))
        rewards = f" with rewards of {scorers}" if scorers else ""
        console.print(
            f"{counts}{rewards}, and {result.batches:,} batches of them; its envs have"
            " `replicas: 0`",
            highlight=False,
        )
    elif request.rollouts == "untrained":
        batch = f"batch {version} is made of them"
        if not result.has_batch:
            batch = "they do not make a batch yet"
        console.print(f"{counts}; {batch}", highlight=False)
    console.print(
        f"continue it: streamrl up {request.name} --resume", highlight=False, soft_wrap=True
    )


def fork(request: ForkRequest, time_s: float, progress: OnProgress) -> ForkResult:
    """Make the run that is asked for.

    This makes the run's directory, and its topics on the parent's cluster or on a local broker.
    `time_s` is now, in seconds since the epoch. If it fails, it removes all of it. Raises
    ConfigError for a version or a setting that cannot be forked, InputGone if retention has deleted
    what is needed, and VersionMismatch if the weights do not come out as announced.
    """
    parent = request.parent
    version = request.version
    run = child_run_file(parent, request.name, request.overrides)
    with ExitStack() as stack:
        old = KafkaLog(stack.enter_context(connect.connect_or_start(parent)), parent.run)
        announced = announced_hashes(old, parent.learner.name)
        if version not in announced:
            raise ConfigError(
                f"--at {version}: run {parent.run} has not announced that version; the newest is"
                f" {max(announced, default=-1)}"
            )
        run = run.model_copy(
            update={"fork": Fork(run=parent.run, version=version, sha256=announced[version])}
        )
        scorers = request.rollouts.scorers if isinstance(request.rollouts, Retrain) else ()
        shared = [env for env in run.envs if env in parent.envs]
        rewards = read_rewards(old, shared, scorers)
        stack.enter_context(_new_directory(run))
        settings = stack.enter_context(connect.connect_or_start(run, create=True))
        recorded = {topology.rewards(env): run.topics.partitions for env in rewards}
        topic_changes.create(run, settings, recorded)
        with _topics_gone_on_failure(run, settings):
            uri = _seed(parent, run, old, version, progress).uri
            new = KafkaLog(settings, run.run)
            if isinstance(request.rollouts, Retrain):
                result = copy_for_retraining(old, new, parent, run, uri, scorers, rewards)
            else:
                with_rollouts = request.rollouts == "untrained"
                result = copy_inherited(old, new, parent, run, uri, with_rollouts, time_s)
            # The run file comes last, because a directory without one is no run.
            write_run_file(result.run)
    return result


def child_run_file(parent: RunFile, name: str, overrides: Sequence[str]) -> RunFile:
    """The run file of a fork, without its section `fork`.

    Raises ConfigError for a change that does not fit the parent's weights.
    """
    for override in overrides:
        if override.startswith(("fork", "run=")):
            raise ConfigError(f"--set {override}: give --as and --at instead")
    if not NAME.fullmatch(name):
        raise ConfigError(f"--as {name}: not a name of lowercase letters, digits and '-'")
    run = with_overrides(parent, overrides).model_copy(update={"run": name})
    if run.model.model_copy(update={"history": parent.model.history}) != parent.model:
        raise ConfigError(
            f"--set model...: a fork continues with the weights of {parent.run}, so model,"
            " vocabulary and tokenizer stay what they are"
        )
    for name in OPTIMIZER_STATE:
        if getattr(run.learner, name) != getattr(parent.learner, name):
            raise ConfigError(
                f"--set learner.{name}: a fork continues with the state of the parent's optimizer,"
                f" made with {getattr(parent.learner, name)}; begin a new run from an export"
                " instead (`streamrl export-model`, then model.path)"
            )
    if run.learner.lora != parent.learner.lora:
        raise ConfigError(
            f"--set learner.lora...: a fork continues with the weights of {parent.run}, which are"
            " those of its adapters, or of a whole model; begin a new run from an export instead"
            " (`streamrl export-model`, then model.path)"
        )
    return run


def _seed(parent: RunFile, run: RunFile, old: Log, version: int, progress: OnProgress) -> WeightRef:
    # JAX does not support that its process forks, so it is imported after the broker has started.
    from streamrl.learner.recompute import seed_fork

    return seed_fork(parent, run, old, version, progress)


@contextmanager
def _new_directory(run: RunFile) -> Iterator[None]:
    """Make the fork's directory, and remove it if the block fails."""
    try:
        run.directory.mkdir(parents=True)
    except FileExistsError:
        raise StreamrlError(
            f"{run.directory} exists; take another name for the fork, or remove it"
        ) from None
    try:
        yield
    except BaseException:
        shutil.rmtree(run.directory, ignore_errors=True)
        raise


@contextmanager
def _topics_gone_on_failure(run: RunFile, settings: Mapping[str, Any]) -> Iterator[None]:
    """Delete the fork's topics if the block fails."""
    try:
        yield
    except BaseException:
        topic_changes.delete(run, settings)
        raise
