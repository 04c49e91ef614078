"""What a version of a scorer has touched: in a run that rescored, in a fork, and with sessions."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.config.run_file import RunFile, with_overrides
from streamrl.extensions.recordings.audit_scorer import BatchShare, EnvCount, audit_scorer
from streamrl.extensions.recordings.new_rewards import ScorerVersion
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Reward, Rollout
from tests.support.build import rollout
from tests.support.data_path import RUN, TOPICS, play, publish, published

BROKEN = ScorerVersion("judge", "3")
OF_FORK: RunFile = RUN.model_copy(
    update={
        "fork": with_overrides(
            RUN, ("fork={run: p, version: 0, sha256: ab, scorers: ['judge@3']}",)
        ).fork
    }
)


def reward(uid: str, value: float = 1.0, **fields: object) -> Reward:
    made = {
        "name": "exact",
        "value": value,
        "scorer": "judge",
        "scorer_version": "3",
        "rescored": True,
    }
    return Reward(rollout=uid, **{**made, **fields})  # type: ignore[arg-type]


@pytest.fixture
def log() -> MemoryLog:
    """Two batches of 8 groups of 2 rollouts, and a version of the first."""
    log = MemoryLog({**TOPICS, "rewards.copy": 1, "rewards.add": 1})
    play(log, batches=2)
    return log


def give(log: MemoryLog, *rewards: Reward) -> None:
    publish(log, *(Output("rewards.copy", each.rollout, each) for each in rewards))


def trained(log: MemoryLog, uid: str) -> Rollout:
    records = published(log, "rollouts.copy", Rollout)
    return next(rollout for rollout in records if rollout.rollout_uid == uid)


def test_batches_and_versions_that_had_its_rewards(log: MemoryLog):
    uids = ("copy-0-0", "copy-0-1", "copy-4-1")
    given = {uid: trained(log, uid).rewards["exact"] for uid in uids}
    give(
        log,
        reward("copy-0-0", given["copy-0-0"]),
        reward("copy-0-1", given["copy-0-1"]),
        reward("copy-4-0", scorer_version="4"),
    )
    result = audit_scorer(log, OF_FORK, BROKEN)
    assert result.envs == {"copy": EnvCount(published=20, touched=2), "add": EnvCount(20)}
    assert result.batches == [BatchShare(batch=0, rollouts=16, touched=2, version=1)]
    assert result.versions == [1]
    give(log, reward("copy-4-1", given["copy-4-1"]))
    assert audit_scorer(log, OF_FORK, BROKEN).batches[1] == BatchShare(1, 16, 1, None)


def test_a_reward_that_no_rescorer_wrote_counts_for_no_scorer(log: MemoryLog):
    """A session's grading key writes rewards, too, and may name whatever scorer it likes."""
    value = trained(log, "copy-0-0").rewards["exact"]
    give(log, reward("copy-0-0", value, rescored=False))
    for run in (RUN, OF_FORK):
        assert audit_scorer(log, run, BROKEN).envs["copy"] == EnvCount(published=20)


def test_rewards_given_later_count_only_in_a_fork_that_has_them(log: MemoryLog):
    value = trained(log, "copy-0-0").rewards["exact"]
    give(
        log,
        reward("copy-0-0", value),
        # the fork has rescored once more, and this rollout was not made with it
        reward("copy-0-1", 7.0),
    )
    assert audit_scorer(log, RUN, BROKEN).envs["copy"] == EnvCount(published=20, unused=2)
    in_fork = audit_scorer(log, OF_FORK, BROKEN)
    assert in_fork.envs["copy"] == EnvCount(published=20, touched=1, unused=1)
    assert [share.touched for share in in_fork.batches] == [1]


def test_a_rollout_that_failed_for_want_of_its_reward(log: MemoryLog):
    failed = rollout("copy", "copy-90", 0, failure="reward 'exact': no judge")
    publish(log, Output("rollouts.copy", failed.group_id, failed))
    give(log, reward(failed.rollout_uid, failure="no judge"))
    other = msgspec.structs.replace(failed, rollout_uid="copy-90-1", failure="no disk")
    publish(log, Output("rollouts.copy", failed.group_id, other))
    give(log, reward("copy-90-1", failure="no judge"))
    count = audit_scorer(log, OF_FORK, BROKEN).envs["copy"]
    assert (count.touched, count.failed, count.unused) == (1, 1, 1)
