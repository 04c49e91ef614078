"""Offset commits take no memory."""

from __future__ import annotations

from streamrl.stream.log.kafka.committer import MAX_UNANSWERED
from streamrl.stream.log.kafka.log import KafkaLog
from tests.support.mock_cluster import mock_cluster
from tests.support.waiting import until


def test_offset_commits_that_are_not_answered_yet_do_not_pile_up():
    """A part commits its offsets once a second for as long as it runs: 10^6 of them are 12 days."""
    with mock_cluster(["r.in"]) as address:
        writer = KafkaLog({"bootstrap.servers": address}, "r").writer("a")
        until(lambda: writer.commit_offsets({("in", 0): 0}))
        sent = 0
        for offset in range(2_000):
            sent += writer.commit_offsets({("in", 0): offset}, wait=False)
            assert writer._committer.unanswered <= MAX_UNANSWERED and not writer._committer.answers
        assert sent >= MAX_UNANSWERED
        until(lambda: writer.commit_offsets({("in", 0): 2_000}))
        assert writer._committer.unanswered == 0 and writer._committer.consumer.poll(0.0) is None
        writer.close()
