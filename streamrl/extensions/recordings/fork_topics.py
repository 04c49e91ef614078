"""What a fork's topics begin with: versions, visits and progress, and the parent's rollouts, as
they were or with other rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.batcher.curriculum import advance
from streamrl.batcher.settings import curriculum_rules, first_state
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.batches import Curriculum
from streamrl.extensions.recordings.first_batch import batcher_cut, first_batch, in_buffer_order
from streamrl.extensions.recordings.inheritance import GroupIndex, GroupKey
from streamrl.extensions.recordings.inherited_records import (
    env_progress,
    index_groups,
    inherited_rollouts,
    inherited_versions,
    inherited_visits,
)
from streamrl.extensions.recordings.new_rewards import RewardsByUid, ScorerVersion
from streamrl.extensions.recordings.offline import FORK, open_writer
from streamrl.extensions.recordings.retraining_fork import RetrainingFork
from streamrl.learner.inputs import read_batches
from streamrl.stream.log.protocol import Log, Message
from streamrl.stream.log.reading import portions


class ForkResult(NamedTuple):
    """The records that a fork begins with."""

    run: RunFile
    groups: int
    rollouts: int
    has_batch: bool  # whether the rollouts were enough for its first batch
    batches: int = 0  # made of rollouts that are trained on again


def copy_inherited(
    old: Log, new: Log, parent: RunFile, run: RunFile, uri: str, with_rollouts: bool, time_s: float
) -> ForkResult:
    """Write the first records of a fork to its topics.

    The fork's first version is `run.fork.version`, and its weights are at `uri`. The run file that
    is returned also has the states of the curriculum and of the batcher's balance.
    """
    run = with_curriculum_state(old, parent, run)
    assert run.fork is not None
    _copy(new, inherited_versions(old, parent, run, uri))
    _copy(new, inherited_visits(old, parent, run))
    if not with_rollouts:
        _copy(new, env_progress(old, parent, run, {}))
        return ForkResult(run, 0, 0, False)
    version = run.fork.version
    cut = batcher_cut(old, parent, version)
    cut.held = [group for group in cut.held if group[0] in run.envs]
    # The balance between the envs' shares means nothing when the shares have changed.
    if curriculum_settings(run) == curriculum_settings(parent):
        run = run.model_copy(update={"fork": run.fork.model_copy(update={"balance": cut.balance})})
    index = index_groups(old, parent, run)
    max_age = max(run.buffer_of(env).max_age for env in run.envs)
    groups = index.inherited(version, max_age) | dict.fromkeys(cut.held)
    # The groups that the parent's batcher held come first, in the order in which its buffer read
    # their rollouts.
    recorded_order = list(in_buffer_order(old, parent, dict.fromkeys(cut.held), version))
    first = [m for m in recorded_order if topology.kind_of(m.topic) == topology.ROLLOUTS]
    _copy(new, first)
    has_batch = first_batch(new, run, recorded_order, cut, time_s)
    copied = {(message.topic, message.partition, message.offset) for message in first}
    others = (
        message
        for message in inherited_rollouts(old, run, groups)
        if (message.topic, message.partition, message.offset) not in copied
    )
    count = len(first) + _copy(new, others)
    groups_of_producers = Counter(index.producers[group] for group in groups)
    _copy(new, env_progress(old, parent, run, groups_of_producers))
    return ForkResult(run, len(groups), count, has_batch)


def copy_for_retraining(
    old: Log,
    new: Log,
    parent: RunFile,
    run: RunFile,
    uri: str,
    scorers: Sequence[ScorerVersion],
    rewards: Mapping[str, RewardsByUid],
) -> ForkResult:
    """Write the first records of a fork that trains on the recorded rollouts again. An env has the
    rewards of `scorers`, which are `rewards` by env; one that is not among them keeps its own.

    The run file that is returned starts no env: what an env sampled before the recorded rollouts
    are trained on would be too old.
    """
    run = with_curriculum_state(old, parent, run)
    assert run.fork is not None
    version = run.fork.version
    _copy(new, inherited_versions(old, parent, run, uri))
    _copy(new, inherited_visits(old, parent, run))
    changes: dict[str, Any] = {"scorers": [str(scorer) for scorer in scorers]}
    if curriculum_settings(run) == curriculum_settings(parent):
        changes["balance"] = batcher_cut(old, parent, version).balance
    envs = {name: env.model_copy(update={"replicas": 0}) for name, env in run.envs.items()}
    stopped = run.model_copy(update={"fork": run.fork.model_copy(update=changes), "envs": envs})
    trained = groups_before(old, version)
    fork = RetrainingFork(
        old=old, new=new, parent=parent, run=stopped, rewards=rewards, trained=trained
    )
    fork.write()
    _copy(new, env_progress(old, parent, run, fork.groups_of_producers()))
    batches = sum(1 for _ in read_batches(new))
    return ForkResult(
        run=stopped,
        groups=len(fork.producers),
        rollouts=fork.rollouts,
        has_batch=batches > 0,
        batches=batches,
    )


def groups_before(old: Log, version: int) -> dict[GroupKey, None]:
    """The groups in the batches before `version`."""
    index = GroupIndex()
    for batch, _ in read_batches(old):
        if batch.number >= version:
            break
        index.add_batch(batch)
    return index.trained


def curriculum_settings(run: RunFile) -> tuple[dict[str, float], Curriculum | None]:
    """The settings that decide the envs' shares of a batch."""
    return {name: env.fraction for name, env in run.envs.items()}, run.batcher.curriculum


def with_curriculum_state(old: Log, parent: RunFile, run: RunFile) -> RunFile:
    """The fork's run file, with the curriculum's state after the parent's earlier batches."""
    assert run.fork is not None
    rules = curriculum_rules(run)
    progress = first_state(parent.fork).progress
    if rules.kind == "none":
        return run
    for batch, _ in read_batches(old):
        if batch.number >= run.fork.version:
            break
        progress = advance(rules, progress, batch)
    state = {"stage": progress.stage, "rewards": progress.rewards}
    return run.model_copy(update={"fork": run.fork.model_copy(update=state)})


def _copy(new: Log, messages: Iterable[Message]) -> int:
    """Write copies of messages to the partitions of their keys. Returns the number of messages."""
    count = 0
    with open_writer(new, FORK) as writer:
        for portion in portions(messages):
            writer.commit([message._replace(partition=-1, offset=-1) for message in portion])
            count += len(portion)
    return count
