"""`streamrl audit --scorer`: what was trained on rewards of one version of a scorer, for instance
one that turned out to be wrong.

A reward that `streamrl rescore` gave changed nothing in its own run. It counts in a fork that was
made with it (`fork.scorers`), for the rollouts that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.new_rewards import ScorerVersion
from streamrl.extensions.recordings.rescore import rewards_of_scorer
from streamrl.learner.inputs import read_batches
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.records_of import rollouts_of
from streamrl.stream.records import Batch, Reward, Rollout
from streamrl.weights.announcements import newest_lineages, read_announcements

EnvUid = tuple[str, str]  # env, uid of a rollout


class BatchShare(NamedTuple):
    """How many rollouts of a batch had a reward of the scorer."""

    batch: int
    rollouts: int
    touched: int
    version: int | None  # that was trained on it; None if there is none yet


@dataclass
class EnvCount:
    """The rollouts of an env."""

    published: int = 0
    touched: int = 0  # have a reward of the scorer
    failed: int = 0  # have failed because the scorer had no reward for them
    unused: int = 0  # were given a reward of it later, which nothing was trained on


@dataclass
class ScorerAudit:
    """What a version of a scorer has touched."""

    envs: dict[str, EnvCount] = field(default_factory=dict[str, EnvCount])
    batches: list[BatchShare] = field(default_factory=list[BatchShare])  # those touched

    @property
    def versions(self) -> list[int]:
        """The policy versions that were trained on touched batches."""
        return [share.version for share in self.batches if share.version is not None]


def audit_scorer(log: Log, run: RunFile, scorer: ScorerVersion) -> ScorerAudit:
    """Find the rollouts, batches and versions that had rewards of this scorer."""
    result = ScorerAudit()
    touched: dict[EnvUid, None] = {}
    is_of_fork = run.fork is not None and str(scorer) in run.fork.scorers
    result.envs = {env: EnvCount() for env in run.envs}
    for family in topology.families(run.envs):
        envs = [env for env in run.envs if topology.family_of(env) == family]
        rewards = {env: rewards_of_scorer(log, env, *scorer) for env in envs}
        for env, rollout, _ in rollouts_of(log, envs):
            count = result.envs[env]
            count.published += 1
            given = rewards[env].get(rollout.rollout_uid, ())
            if any(is_part_of(rollout, reward, is_of_fork) for reward in given):
                count.touched += 1
                count.failed += bool(rollout.failure)
                touched[env, rollout.rollout_uid] = None
            elif given:
                count.unused += 1
    announced = newest_lineages(read_announcements(log, run.learner.name))
    trained = {record.batch: version for version, record in announced.items()}
    for batch, _ in read_batches(log):
        uids = rollouts_in(batch)
        of_scorer = sum(uid in touched for uid in uids)
        if of_scorer:
            version = trained.get(batch.number)
            result.batches.append(BatchShare(batch.number, len(uids), of_scorer, version))
    return result


def is_part_of(rollout: Rollout, reward: Reward, is_of_fork: bool) -> bool:
    """Was the reward one of those that made the rollout what it is?

    `is_of_fork`: the run is a fork that was made with rewards of this scorer.
    """
    if not is_of_fork:
        return False
    if reward.failure:
        return reward.failure in rollout.failure
    return rollout.rewards.get(reward.name) == reward.value


def rollouts_in(batch: Batch) -> Sequence[EnvUid]:
    """The rollouts of a batch, each once."""
    rollouts: dict[EnvUid, None] = {}
    for uid, group in zip(batch.uids, batch.groups.tolist(), strict=True):
        env = batch.environments[batch.group_environments[group]]
        rollouts[env, uid] = None
    return list(rollouts)
