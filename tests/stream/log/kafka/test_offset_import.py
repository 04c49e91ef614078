"""A recorded partition is written again on a real broker, every record at its old offset."""

from __future__ import annotations

import pytest

from streamrl.stream.log.import_plan import WriteOp, plan_writes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.offset_import import OffsetPreservingWriter
from streamrl.stream.log.protocol import Message, end_offset
from streamrl.stream.log.reading import read
from streamrl.system.errors import BrokerError
from tests.support.kafka import make_topics

WHERE = ("fates", 0)


def recorded(offset: int) -> Message:
    return Message("fates", b"k", b"v%d" % offset, (), 0, offset, 1_700_000_000.0 + offset)


@pytest.fixture
def log(broker: str, run_name: str) -> KafkaLog:
    make_topics(broker, {f"{run_name}.fates": 1})
    return KafkaLog({"bootstrap.servers": broker}, run_name)


def test_every_record_gets_its_old_offset_and_its_old_time(log: KafkaLog):
    """Offset 2 is a marker, 4 to 6 are what an aborted transaction left, and 8 is a marker."""
    messages = [recorded(offset) for offset in (0, 1, 3, 7)]
    writer = OffsetPreservingWriter(log)
    for op in plan_writes(WHERE, 0, 9, messages):
        writer.write([op])
    writer.wait()
    found = list(read(log, *WHERE))
    assert [(m.offset, m.value, m.timestamp_s) for m in found] == [
        (m.offset, m.value, m.timestamp_s) for m in messages
    ]
    assert end_offset(log, *WHERE) == 9


def test_a_record_that_lands_elsewhere_ends_the_import(log: KafkaLog):
    """Somebody else has written to the topic."""
    other = log.producer()
    other.send(recorded(0))
    other.flush()
    writer = OffsetPreservingWriter(log)
    with pytest.raises(
        BrokerError, match=r"^fates\[0\]@0 was written at offset 1; does another program write to t"
    ):
        writer.write([WriteOp(WHERE, [recorded(0)], 0, 1)])
