"""Which of the announced versions is the newest."""

from __future__ import annotations

import pytest

from streamrl.inference.servers.version_follower import VersionFollower
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import TopicMissing
from tests.support.data_path import publish


def announced(version: int, lineage: int = 0, learner: str = "lead") -> PolicyVersion:
    return PolicyVersion(
        learner=learner, version=version, uri="", size_bytes=1, sha256="ab", lineage=lineage
    )


def publish_all(log: MemoryLog, *records: PolicyVersion) -> None:
    publish(log, *(Output("policy-versions", record.learner, record) for record in records))


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog({"policy-versions": 1})


def test_nothing_is_announced(log: MemoryLog):
    assert VersionFollower(log, "lead").newest(0.0) is None


def test_whoever_comes_late_gets_the_newest_version_at_once(log: MemoryLog):
    publish_all(log, *(announced(version) for version in range(600)))
    newest = VersionFollower(log, "lead").newest(0.0)
    assert newest is not None and newest.version == 599


def test_an_older_version_that_is_announced_again_changes_nothing(log: MemoryLog):
    publish_all(log, announced(2))
    follower = VersionFollower(log, "lead")
    newest = follower.newest(0.0)
    publish_all(log, announced(1, lineage=5), announced(2))
    assert follower.newest(1.0) is newest


def test_of_one_version_the_newest_lineage_counts(log: MemoryLog):
    publish_all(log, announced(2, lineage=1), announced(2))
    newest = VersionFollower(log, "lead").newest(0.0)
    assert newest is not None and newest.lineage == 1


def test_other_learners_do_not_count(log: MemoryLog):
    publish_all(log, announced(1), announced(9, learner="other"))
    newest = VersionFollower(log, "lead").newest(0.0)
    assert newest is not None and newest.version == 1


def test_without_the_topic():
    with pytest.raises(TopicMissing, match="policy-versions"):
        VersionFollower(MemoryLog({"servers": 1}), "lead")
