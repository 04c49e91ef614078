"""Which announcement of a version is valid, in logs written by hand."""

from __future__ import annotations

import threading

import msgspec

from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion
from streamrl.weights.announcements import (
    announced_hashes,
    announcement_order,
    newest_lineages,
    wait_for_version,
)
from tests.support.data_path import publish


def a_log() -> MemoryLog:
    return MemoryLog({"policy-versions": 1})


def announced(version: int, lineage: int = 0, sha256: str = "ab") -> PolicyVersion:
    return PolicyVersion(
        learner="lead",
        version=version,
        uri="file:///x",
        size_bytes=1,
        sha256=sha256,
        lineage=lineage,
    )


def test_an_announcement_is_waited_for():
    log = a_log()
    stop = threading.Event()
    record = PolicyVersion(learner="lead", version=4, uri="file:///x", size_bytes=1, sha256="ab")
    other = msgspec.structs.replace(record, learner="other", sha256="cd")
    later = threading.Timer(0.2, lambda: publish(log, Output("policy-versions", "lead", record)))
    publish(log, Output("policy-versions", "other", other))
    later.start()
    assert wait_for_version(log, "lead", 4, stop) == record
    later.join()
    stop.set()
    assert wait_for_version(log, "lead", 5, stop) is None


def test_of_several_lineages_of_a_version_the_newest_is_valid():
    log = a_log()
    stop = threading.Event()
    first = PolicyVersion(learner="lead", version=4, uri="file:///x", size_bytes=1, sha256="ab")
    again = msgspec.structs.replace(first, sha256="cd", lineage=1, replaces="ab")
    for record in (first, again, msgspec.structs.replace(first, version=3)):
        publish(log, Output("policy-versions", "lead", record))
    assert (
        announced_hashes(log, "lead") == {4: "cd", 3: "ab"}
        and wait_for_version(log, "lead", 4, stop) == again
    )
    assert newest_lineages([again, first]) == {4: again}  # in whatever order they are heard of


def test_of_a_lineage_that_is_announced_twice_the_last_announcement_counts():
    one, other = announced(4), announced(4, sha256="cd")
    assert newest_lineages([one, other])[4] is other


def test_announcements_are_ordered_by_version_and_lineage():
    first, again, next_version = announced(2), announced(2, lineage=1), announced(3)
    ordered = sorted([next_version, again, first], key=announcement_order)
    assert [(record.version, record.lineage) for record in ordered] == [(2, 0), (2, 1), (3, 0)]
