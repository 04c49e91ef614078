"""What is Kafka's alone: marks that take no memory, errors without a topic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from streamrl.errors import AccessDenied
from streamrl.stream.kafka import MAX_UNANSWERED, KafkaLog
from tests.mock_cluster import mock_cluster
from tests.waiting import until


def test_marks_that_are_not_answered_yet_do_not_pile_up():
    """A part marks its positions once a second for as long as it runs: 10^6 marks are 12 days."""
    with mock_cluster(["r.in"]) as address:
        writer = KafkaLog({"bootstrap.servers": address}, "r").writer("a")
        until(lambda: writer.mark({("in", 0): 0}))
        sent = 0
        for offset in range(2_000):
            sent += writer.mark({("in", 0): offset}, wait=False)
            assert writer._unanswered <= MAX_UNANSWERED and not writer._answers
        assert sent >= MAX_UNANSWERED
        until(lambda: writer.mark({("in", 0): 2_000}))
        assert writer._unanswered == 0 and writer._group.poll(0.0) is None
        writer.close()


def test_positions_that_cannot_be_marked_are_a_warning_and_no_end(caplog: pytest.LogCaptureFixture):
    with mock_cluster([]) as address:
        writer = KafkaLog({"bootstrap.servers": address}, "r").writer("a")
        assert not writer.mark({("nowhere", 0): 1})
        assert "a: its positions are not shown to lag tools for now" in caplog.text
        writer.close()


def test_a_reader_whose_group_is_refused_says_so():
    """Such an error has no topic, as it is of none."""
    with mock_cluster(["r.in"]) as address:
        reader = KafkaLog({"bootstrap.servers": address}, "r").reader({("in", 0): 0})
        refused = SimpleNamespace(topic=lambda: None, partition=int, offset=int, error=lambda: KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
        reader.close()
        reader._consumer = SimpleNamespace(consume=lambda *_: [refused])
        with pytest.raises(AccessDenied, match="use group r.reader"):
            reader.poll(1, 0.0)
