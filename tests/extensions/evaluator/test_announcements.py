from __future__ import annotations

from contextlib import closing

from streamrl.extensions.evaluator.announcements import Announcements
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion
from tests.support.data_path import publish


def announce(log: MemoryLog, version: int, lineage: int = 0, learner: str = "lead") -> None:
    record = PolicyVersion(
        learner=learner,
        version=version,
        uri="file:///nowhere",
        size_bytes=1,
        sha256=f"{version}, {lineage}",
        lineage=lineage,
    )
    publish(log, Output("policy-versions", learner, record))


def test_of_each_version_the_newest_lineage_counts():
    log = MemoryLog({"policy-versions": 1})
    announce(log, 0)
    announce(log, 1, lineage=1)
    announce(log, 9, learner="second")
    with closing(Announcements(log, "lead")) as announced:
        announced.poll()
        announce(log, 0, lineage=1)
        announce(log, 1)  # an older lineage
        announced.poll()
        assert {n: one.sha256 for n, one in announced.versions.items()} == {0: "0, 1", 1: "1, 1"}


def test_how_far_a_version_is_behind_the_newest():
    log = MemoryLog({"policy-versions": 1})
    with closing(Announcements(log, "lead")) as announced:
        assert announced.behind(-1) == 0
        for version in (3, 4, 7):
            announce(log, version)
        announced.poll()
        assert (announced.behind(-1), announced.behind(4), announced.behind(7)) == (3, 3, 0)
