"""When a version is loaded, worked by hand: again after 5, 10, 20, 40, 60, 60 s."""

from __future__ import annotations

from streamrl.inference.servers.load_schedule import LoadSchedule
from streamrl.stream.records import PolicyVersion


def version(number: int) -> PolicyVersion:
    return PolicyVersion(learner="lead", version=number, uri="", size_bytes=1, sha256="ab")


def test_a_version_is_loaded_once():
    first = version(0)
    schedule = LoadSchedule()
    assert schedule.is_due(first, 0.0)
    schedule.on_attempt(first)
    schedule.on_success()
    assert not schedule.is_due(first, 1e9)
    assert schedule.is_due(version(1), 0.0)


def test_the_time_to_the_next_attempt_doubles_up_to_a_minute():
    first = version(0)
    schedule = LoadSchedule()
    for wait_s in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        schedule.on_attempt(first)
        schedule.on_failure(100.0)
        assert not schedule.is_due(first, 100.0 + wait_s - 0.1)
        assert schedule.is_due(first, 100.0 + wait_s)


def test_a_newer_version_does_not_wait_for_the_retry_of_an_older_one():
    schedule = LoadSchedule()
    schedule.on_attempt(version(0))
    schedule.on_failure(100.0)
    assert schedule.is_due(version(1), 100.0)


def test_after_a_success_a_failure_counts_as_the_first():
    schedule = LoadSchedule()
    for number in range(3):
        schedule.on_attempt(version(number))
        schedule.on_failure(0.0)
    schedule.on_attempt(version(3))
    schedule.on_success()
    last = version(4)
    schedule.on_attempt(last)
    schedule.on_failure(100.0)
    assert schedule.is_due(last, 105.0)
